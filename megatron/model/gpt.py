"""The GPT of the papers. The encoding takes part through its hooks only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.attention import Choice, choose, joined
from megatron.attention.documents import Documents, by_document
from megatron.attention.encoded import (
    AttentionInputs,
    LayerCache,
    LayerInputs,
    inputs_of,
    prepare,
)
from megatron.attention.flex import MOST_PROGRAMS
from megatron.attention.terms import Content, Terms
from megatron.errors import UserError
from megatron.model.block import Attention, Block, normalisation
from megatron.model.cache import Cache
from megatron.model.head import loss_of_block, mean_loss, token_losses
from megatron.model.settings import Architecture, AttentionSettings, initialize
from megatron.positions import Position
from megatron.positions.layers import Placed

HOOKS_OF_TERMS = (
    "distance_bias",
    "distance_weight",
    "index_bias",
    "on_scores",
    "score_bias",
    "block_scores",
)


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """How attention is computed in a layer; layers with one encoding and window share it.

    name: of the encoding, where layers differ; method: what moves its tokens; backend: as
    configured
    """

    position: Position
    name: str
    window: int | None
    method: Any
    backend: str


def with_positions(
    position: Position, x: Tensor, start: int, documents: Documents | None
) -> Tensor:
    """What an encoding makes of embeddings from `start` on: [batch, tokens, hidden] -> same."""
    if documents is not None and documents.restart and position.has("on_embeddings"):
        (x,) = by_document(lambda *part: (position.on_embeddings(*part),), (x,), documents)
        return x
    return position.on_embeddings(x, start)


def attention_inputs(
    plans: Iterable[LayerPlan],
    settings: AttentionSettings,
    new: slice,
    length: int,
    documents: Documents | None,
) -> dict[LayerPlan, AttentionInputs]:
    """What the layers of each plan read beside x; tables are computed once per encoding.

    new: the places of the tokens that are computed, in a text of `length`
    """
    tables: dict[Position, tuple[Tensor | None, Tensor | None]] = {}
    inputs: dict[LayerPlan, AttentionInputs] = {}
    for plan in dict.fromkeys(plans):
        position, method = plan.position, plan.method
        if position not in tables:
            columns = length if method is None else method.table_length(length)
            tables[position] = (
                settings.table(position.distance_bias(columns)),
                settings.table(position.distance_weight(columns)),
            )
        chunk = max(1, position.shape.train_length // 2) if settings.blockwise else None
        inputs[plan] = inputs_of(
            position,
            Terms(*tables[position], plan.window, chunk),
            new,
            length,
            documents,
            log_n=settings.logn_scale,
            method=method,
            backend=plan.backend,
            self_check=settings.attention_self_check,
        )
    return inputs


PIECE = 128
"""Tokens of a text that are read at a time, if an encoding works on all scores."""


class GPT(nn.Module):
    """A decoder-only language model.

    model: sizes and first values; attention: how it is computed, which may change later;
    positions: the encoding, one for all layers or one for each, or those of layers that differ;
    position_of_layer: which of them each layer has, where layers differ; as all that is said of
    encodings and windows it is about the layers that have attention
    named: whether their names stand beside their layers;
    vocab: rows of the embedding, padding included;
    end_of_document: the token that ends a document, for reset_attention_mask

    begin_of_text: set where the tokenizer of an imported model asks for a token before each text
    context: set where each of several processes computes a part of every text. Then `forward` is
    given the whole text, and returns what belongs to the own part.
    """

    def __init__(
        self,
        model: Architecture,
        attention: AttentionSettings,
        *,
        positions: Sequence[Position],
        vocab: int,
        position_of_layer: Sequence[int] | None = None,
        named: bool = False,
        end_of_document: int | None = None,
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.vocab = vocab
        self.end_of_document = end_of_document
        self.begin_of_text: int | None = None
        self.train_length = model.seq_length
        self.dropout = model.hidden_dropout
        self.checkpoint_activations = False
        self.block_loss = loss_of_block
        self.context: Any = None
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.embedding_norm = normalisation(hidden, model) if model.embedding_norm else None
        self.embedding_scale, self.logit_scale = model.embedding_scale, model.logit_scale
        self.layers = nn.ModuleList()
        for kind in model.kinds:
            self.layers.append(Block(model, kind))
        self.norm = normalisation(hidden, model)
        self.final_linear = None
        if model.no_weight_tying:
            self.final_linear = nn.Linear(hidden, vocab, bias=model.use_bias_in_output)
        initialize(self, model)
        self.attention_layers = model.attention_layers
        # After `initialize`: an encoding sets its own first values.
        self.positions = nn.ModuleList(positions)
        if position_of_layer is None:  # one for all layers, or one for each
            count = len(self.attention_layers)
            position_of_layer = range(count) if len(positions) > 1 else [0] * count
        self.position_of_layer = list(position_of_layer)
        self.named = named
        for position in self._positions:
            position.check_heads(model.key_heads, model.heads_per_query)
            position.check_tokens(vocab, end_of_document)
        for layer, index in zip(self.attention_layers, self.position_of_layer, strict=True):
            cast(Block, self.layers[layer]).attention.check_position(self._positions[index])
        self.use_attention(attention)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        cache: Cache | None = None,
        *,
        mean: bool = False,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with labels the cross entropy of each token.

        ids [batch, length] -> logits [batch, length, vocab], or those of the targets that counted
        marks alone, [targets, vocab];
        with labels [batch, length] -> losses [batch, length] float32, or with `mean` their mean [],
        of those targets alone that counted [batch, length] bool marks; other losses are 0;
        with a cache, ids continue its text.
        """
        first = 0
        if counted is not None and not mean and cache is None and self.context is None:
            first = int(counted.any(dim=0).int().argmax())
        x = self.features(ids, cache, first)
        if self.context is not None:
            part = self.context.part(ids.shape[1])
            labels = None if labels is None else labels[:, part]
            counted = None if counted is None else counted[:, part]
        if labels is None:
            return self.logits(x if counted is None else x[counted[:, first:]])
        if mean:
            marked = None if counted is None else counted.flatten()
            matrix, bias = self.output_matrix, self.output_bias
            targets = labels.flatten()
            return mean_loss(x.flatten(0, 1), matrix, targets, marked, bias, self.block_loss)
        if counted is None:
            return self.losses(x, labels)
        losses = torch.zeros(labels.shape, device=x.device)
        losses[counted] = self.losses(x[counted[:, first:]], labels[counted])
        return losses

    def features(self, ids: Tensor, cache: Cache | None = None, first: int = 0) -> Tensor:
        """ids [batch, length] -> [batch, length - first, hidden], after the final norm and scale.

        first: tokens before it are only read, so the last layer has no queries of them
        """
        if ids.dim() != 2:
            raise UserError(f"ids: {list(ids.shape)} must be [batch, length]")
        start = 0 if cache is None else cache.length
        length = start + ids.shape[1]
        prepare(self._positions, length, start)
        # Where attention has all scores at once, pieces take less memory and time. Gradients need
        # them all anyway, compiled layers have fixed shapes, and layers with a state prepare their
        # own encodings.
        has_scores = any(position.has("on_scores") for position in self._positions)
        is_short = ids.shape[1] <= PIECE
        learns = self.training or torch.is_grad_enabled()
        is_compiled = self.block_loss is not loss_of_block
        has_states = len(self.plans) < len(self.layers)
        if not has_scores or is_short or learns or is_compiled or has_states:
            return self._features(ids, cache, first)
        self.check_length(length)
        cache = cache or Cache()
        pieces = [self._features(piece, cache) for piece in ids.split(PIECE, dim=1)]
        return torch.cat(pieces, dim=1)[:, first:]

    def _features(self, ids: Tensor, cache: Cache | None, first: int = 0) -> Tensor:
        """`features`, of tokens that the encodings are prepared for."""
        start = 0 if cache is None else cache.length
        length = start + ids.shape[1]  # of the whole text
        if cache is not None and not cache.layers:
            cache.layers = [LayerCache() for _ in self.layers]
        documents = None
        if self.attention.reset_attention_mask:
            if self.end_of_document is None:
                raise UserError(
                    "reset_attention_mask: which token ends a document is not known, because the"
                    " model has no tokenizer - set it to false, or import the model with its"
                    " tokenizer"
                )
            earlier = None if cache is None else cache.document_ends
            restart = self.attention.reset_position_ids
            documents = Documents.of(ids, self.end_of_document, earlier=earlier, restart=restart)
            if cache is not None:
                cache.document_ends = documents.ends
        if self.context is not None:
            part = self.context.part(length)
            ids, start = ids[:, part], part.start
            documents = None if documents is None else replace(documents, new=part)

        x = self.word_embeddings(ids)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = with_positions(self.position, x, start, documents)
        memory = {} if cache is None else cache.embeddings.memory
        x = self.position.on_embeddings_by_ids(x, ids, memory)
        x = F.dropout(x, self.dropout, self.training)
        count = x.shape[1]
        new = slice(start, start + count)
        inputs = attention_inputs(self.plans.values(), self.attention, new, length, documents)
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for layer, block in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[layer]
            read = LayerInputs(start=start, length=length, documents=documents)
            if layer in self.plans:
                read = inputs[self.plans[layer]]
                if layer == len(self.layers) - 1:
                    read = replace(read, first_query=first)
            read = replace(read, cache=layer_cache, context=self.context)
            if recompute:
                x = cast(Tensor, checkpoint(block, x, read, use_reentrant=False))
            else:
                x = block(x, read)
        if cache is not None:
            cache.length = length
        x = self.norm(x[:, first - count :])  # the last layer may keep all tokens
        return x if self.logit_scale == 1 else x * self.logit_scale

    def compile_layers(self, **options: Any) -> None:
        """Compile every layer, and the blocks of the loss, for fixed shapes by torch.compile.

        Equal layers share a graph. Names in the state dict stay. options: of torch.compile
        """
        torch._dynamo.config.recompile_limit = MOST_PROGRAMS
        for layer in self.layers:
            layer.compile(dynamic=False, **options)
        self.block_loss = torch.compile(loss_of_block, dynamic=False, **options)

    def check_length(self, length: int) -> None:
        """Raises UserError if an encoding has no positions for a text of so many tokens."""
        weight = self.word_embeddings.weight
        last_token = weight.new_zeros(1, 1, weight.shape[1])
        for position in self._positions:
            position.prepare(length)
            shape = position.shape
            last_query = weight.new_zeros(1, shape.heads, 1, shape.head_dim)
            position.on_queries_keys(last_query, last_query, length - 1)
        self.position.on_embeddings(last_token, length - 1)

    def losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each token in float32.

        x [..., hidden], labels [...] -> [...]
        """
        matrix, bias = self.output_matrix, self.output_bias
        losses = token_losses(x.flatten(0, -2), matrix, labels.flatten(), bias)
        return losses.view_as(labels)

    def logits(self, x: Tensor) -> Tensor:
        """x [..., hidden] as `features` returns it -> [..., vocab]."""
        return F.linear(x, self.output_matrix, self.output_bias)

    def use_attention(
        self, attention: AttentionSettings, options: Mapping[str, Any] | None = None
    ) -> None:
        """Compute attention with other settings, such as backend, window and log-n scale.

        options: of encodings in place of their own, for those that may change them within a run

        Raises UserError for paper_precision of an encoding that the forks do not have, for
        documents that this encoding cannot keep apart, and for methods that exclude each other or
        have no meaning for it.
        """
        attention.check(self._positions, self.train_length)
        self.attention = attention
        for position in self._positions:
            changed = position.changeable(options or {})
            position.use_scaling(changed | attention.scaling(self.train_length))
            position.use_paper_precision(attention.paper_precision)
            if attention.reset_attention_mask:
                position.check_documents(restart=attention.reset_position_ids)
        layers = self.attention_layers
        windows = attention.windows(len(layers), self.train_length)
        shared: dict[tuple[int, int | None], LayerPlan] = {}
        self.plans: dict[int, LayerPlan] = {}  # by layer, of those that have attention
        for layer, index, window in zip(layers, self.position_of_layer, windows, strict=True):
            position = self._positions[index]
            if (index, window) not in shared:
                name = position.registered_name if self.named else ""
                method = attention.method_of_layer(position, window, self.train_length)
                backend = attention.attention_backend
                shared[index, window] = LayerPlan(position, name, window, method, backend)
            self.plans[layer] = shared[index, window]

    def learned(self) -> dict[str, Tensor]:
        """The effective values of the encoding's learned numbers, by name.

        Where layers do not share one encoding, names begin with the first layer that has it.
        """
        if len(self.positions) == 1:
            return self.position.learned()
        values = {}
        for position, layers, name in self.placed:
            prefix = ".".join([f"layer{layers[0]}", name]).rstrip(".")
            for number, value in position.learned().items():
                values[f"{prefix}.{number}"] = value
        return values

    @property
    def placed(self) -> list[Placed]:
        """Each encoding with the layers that have it, in the order of the first of these."""
        layers: dict[tuple[Position, str], list[int]] = {}
        for layer, plan in self.plans.items():
            layers.setdefault((plan.position, plan.name), []).append(layer)
        return [Placed(position, tuple(where), name) for (position, name), where in layers.items()]

    @property
    def attention_choice(self) -> Choice:
        """The attention backend on the model's device, and why; see `joined` where layers differ.

        Raises UserError if the configured one cannot compute this encoding.
        """
        return joined(self.attention_choices)

    @property
    def attention_choices(self) -> list[Choice]:
        """That of each layer with attention."""
        settings = self.attention
        choices = []
        for layer, plan in self.plans.items():
            position, method = plan.position, plan.method
            if method is not None and method.backend is not None:
                choices.append(Choice(method.backend))
                continue
            new, attention = self.word_embeddings.weight.new_empty, self.layers[layer].attention
            features = cast(Attention, attention).features * position.score_width
            q = new(0, position.shape.heads, 0, features)
            bias, weight, index_bias, on_scores, content, scores = (
                getattr(position, hook) if position.has(hook) else None for hook in HOOKS_OF_TERMS
            )
            if content is not None:
                content = Content.of((None, new(0, 0, 0, position.score_rank)), 0)
            chunk = self.train_length if settings.blockwise else None
            segments = new(0, 0) if settings.reset_attention_mask else None
            terms = Terms(
                *(bias, weight, plan.window, chunk, segments),
                index_bias=index_bias,
                on_scores=on_scores,
                content=content,
                scores=scores,
            )
            other_width = features != cast(Attention, attention).value_features
            choices.append(choose(plan.backend, q, terms, other_width=other_width))
        return choices

    @property
    def position(self) -> Position:
        """The encoding of the first layer, whose hook on embeddings acts for all layers."""
        return self._positions[0]

    @property
    def _positions(self) -> Sequence[Position]:
        return cast(Sequence[Position], self.positions)

    @property
    def output_matrix(self) -> Tensor:
        """[vocab, hidden]: the output's own matrix, or the embedding where they are tied."""
        if self.final_linear is None:
            return self.word_embeddings.weight
        return self.final_linear.weight

    @property
    def output_bias(self) -> Tensor | None:
        """[vocab], or None."""
        return None if self.final_linear is None else self.final_linear.bias
