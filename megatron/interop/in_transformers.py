"""Encodings of ours in models of transformers, in place of their own positions.

Such a model stays one of its class. It turns nothing, or adds no learned positions, and a function
that transformers calls for attention (`AttentionInterface`) computes ours. Two hooks of torch bring
what an encoding reads beside queries, keys and values: the one before the trunk finds where each
text begins, the one before each attention computes tables and hands over its input and its cache.
torch.compile leaves all three as they are, because they decide by the values of masks. A third hook
lets from_pretrained read the encoding of a saved folder.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.fusion_mapping import _FUSION_REGISTRY, ModuleFusionSpec
from transformers.modeling_utils import local_torch_dtype

from megatron.attention import LayerCache, encoded
from megatron.attention.documents import Documents
from megatron.attention.encoded import prepare
from megatron.checkpoints.read import fill
from megatron.errors import UserError
from megatron.interop.families import ENCODING, FAMILIES
from megatron.interop.modeling_positions_gpt import Encodings, rows_by_padding
from megatron.model import AttentionSettings, positions_from_config
from megatron.model.gpt import with_positions
from megatron.positions.base import made

CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
)
APPLIED = ("prepare", "on_embeddings")
"""Hooks that are called before the trunk."""


def use(model: PreTrainedModel, name: str | None = None, **options: Any) -> PreTrainedModel:
    """Give a model of transformers another encoding, in place; returns the model.

    model: of one of CLASSES
    name, options: as `pos_emb` and `pos_emb_args`; without a name, those in the config.json that
        the model was loaded with, and the parameters that were loaded with it

    Parameters of the encoding are parameters of the model, in float32, and drawn by torch's
    generator. `save_pretrained` writes them, and name and options into config.json.
    Raises UserError for another class, for a name or an option that is not known, and for an
    encoding that does not fit the model.
    """
    kind = type(model).__name__
    if kind not in CLASSES:
        raise UserError(f"use: {kind} is not offered; give one of {', '.join(CLASSES)}")
    family = FAMILIES[kind]
    trunk: Any = model.base_model
    keys = family.flat(model.config.to_dict())
    if name is not None:
        keys[ENCODING] = {name: options}
    elif not hasattr(trunk, "encodings"):
        raise UserError(
            "use: the model was not loaded by from_pretrained from a folder whose config.json names"
            ' an encoding; name one, as in use(model, "kerple_log")'
        )
    elif hasattr(trunk, "encoding_of_layer"):
        return model  # which has it already
    config = family.configuration(keys)
    positions, position_of_layer = positions_from_config(config)
    for position in positions:
        if position.has("on_embeddings_by_ids"):
            raise UserError(
                f"use: {type(position).__name__} counts by the ids of tokens, which transformers'"
                " caches do not keep; take another encoding, or train it here and use"
                " tools/export_checkpoint.py"
            )
    encodings = Encodings(positions)
    if name is None:
        loaded = trunk.encodings.state_dict(keep_vars=True)
        # transformers marks what it has read, and makes up what a file lacks.
        weights = {key: loaded[key] for key in loaded if hasattr(loaded[key], "_is_hf_initialized")}
        try:
            fill(encodings, weights.items())
        except ValueError as fault:
            raise UserError(
                f"{model.name_or_path}: does not hold the encoding that its config.json names"
                f" ({fault}) - copy the folder again"
            ) from None

    if not hasattr(trunk, "encoding_of_layer"):
        trunk.register_forward_pre_hook(before_trunk, with_kwargs=True)
        for part in trunk.modules():
            if hasattr(part, "is_causal"):
                part.register_forward_pre_hook(before_attention, with_kwargs=True)
    trunk.encodings = encodings.to(model.device).train(model.training)
    attention = AttentionSettings.of(config.attention)
    windows = attention.windows(len(position_of_layer), config.model.seq_length)
    trunk.encoding_of_layer = list(zip(position_of_layer, windows, strict=True))
    if hasattr(trunk, "wpe"):
        trunk.wpe = NoPositions()
    model.set_attn_implementation(ENCODING)
    # transformers refuses a fusion that nobody registered, as we do below; False: nothing is fused.
    names = {"attn_implementation": ENCODING, "fusion_config": {ENCODING: False}}
    model.config.update({ENCODING: keys[ENCODING], **names})
    return model


def add_encodings(model: nn.Module, name: str, trunk: Any) -> None:
    """Before from_pretrained reads weights, add those of the encoding that config.json names.

    torch calls it for every part of a module. The numbers are read with all others, from the same
    folder or revision; `use` makes encodings of them.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or kind not in CLASSES:
        return
    if name == model.base_model_prefix and hasattr(model.config, ENCODING):
        model.config._attn_implementation = ENCODING  # whatever the call asks for
        if trunk.device.type == "meta":  # not in from_config
            family = FAMILIES[kind]
            keys = family.flat(model.config.to_dict())
            with torch.device("cpu"), local_torch_dtype(torch.float32):
                positions, _ = positions_from_config(family.configuration(keys))
            trunk.encodings = nn.ModuleList(positions).to("meta")


class NoPositions(nn.Module):
    """In place of learned positions: 0, in any dtype."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """[..., length] -> []."""
        return position_ids.new_zeros(())


class CachedLayer(LayerCache, DynamicLayer):
    """Our cache of a layer, as a layer of their caches. It keeps all keys, with a window too."""

    is_initialized = True
    reorder_cache = LayerCache.select  # pyright: ignore

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, *_: Any) -> None:
        raise UserError(
            "past_key_values: what an encoding keeps of tokens cannot be taken back or repeated;"
            " leave out what asks for it, such as assistant_model"
        )

    batch_repeat_interleave = batch_select_indices = reset = crop  # pyright: ignore


@torch.compiler.disable
def before_trunk(trunk: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Find the texts, change the embeddings, and say what a layer reads beside its input.

    attention_mask [batch, all tokens]: 1 for tokens, 0 for padding. Padding before a text is a text
    of its own. What is behind a text changes nothing in it.
    position_ids [batch or 1, new tokens] count each text from 0; without a mask and a cache, a row
    may have several texts.
    Raises UserError for any other mask or positions, and for an encoding that reads the whole row.
    """
    if trunk.config._attn_implementation != ENCODING:
        raise UserError("attn_implementation: computes no encoding; leave it as `use` sets it")
    if args:
        [kwargs["input_ids"]] = args
    ids, x = kwargs.pop("input_ids", None), kwargs.get("inputs_embeds")
    if x is None:
        x = trunk.get_input_embeddings()(ids)
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    start = 0 if cache is None else cache.get_seq_length()
    batch, length = x.shape[0], start + x.shape[1]

    ends = x.new_zeros(batch, length, dtype=torch.bool)  # of the texts in each row
    position_ids = kwargs.get("position_ids")
    for padding, rows in rows_by_padding(mask, batch, length).items():
        ends[rows, padding - 1 : padding] = True
    if mask is None and position_ids is not None and not start:
        ends[:, :-1] = position_ids[:, 1:] == 0
    new = ends[:, start:].long()
    documents = Documents.of(new, 1, earlier=ends[:, :start], restart=True)
    if position_ids is not None:
        differs = documents.places != position_ids
        if mask is not None:
            differs &= mask[:, start:].bool()
        if differs.any():
            raise UserError(
                "position_ids: must count the tokens of each text from 0; leave them out, or give"
                " them without attention_mask for rows of several texts"
            )
    several = bool(ends.any())
    if several or (mask is not None and not mask.all()):
        for position in trunk.encodings:
            try:
                position.check_cached(1, length)  # does it turn by the length of a text?
                if several:
                    position.check_documents(restart=True)
            except UserError:
                raise UserError(
                    f"attention_mask, position_ids: {type(position).__name__} reads the row, and"
                    " not each text in it; give texts of one length, one in each row"
                ) from None
    if not several:
        documents = None

    made.cache_clear()
    prepare(trunk.encodings, length, start)
    first, _ = trunk.encoding_of_layer[0]
    kwargs["inputs_embeds"] = with_positions(trunk.encodings[first], x, start, documents)

    segments = None if documents is None else documents.numbers
    return (), kwargs | {"encoding_inputs": (trunk, segments)}


@torch.compiler.disable
def before_attention(attention: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Hand over input and cache, which theirs would fill, and turn nothing: cosines 1, sines 0."""
    layer = attention.layer_idx
    x = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.pop("layer_past" if "layer_past" in kwargs else "past_key_values", None)
    if cache is not None:
        if not isinstance(cache, DynamicCache) or cache.offloading:
            raise UserError(
                f"past_key_values: {type(cache).__name__} does not hold what encodings keep; leave"
                " it and cache_implementation out"
            )
        if not cache.get_seq_length(layer):
            cache.layers[layer : layer + 1] = [CachedLayer()]
        cache = cache.layers[layer]
    kwargs["position_embeddings"] = x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)
    trunk, segments = kwargs["encoding_inputs"]
    index, window = trunk.encoding_of_layer[layer]
    inputs = {"encoding": trunk.encodings[index], "x": x, "cache": cache, "window": window}
    return args, kwargs | {"encoding_inputs": inputs | {"segments": segments}}


@torch.compiler.disable
def encoded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    encoding_inputs: dict[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: the output [batch, length, heads, features], no weights.

    query [batch, heads, length, head_dim], key, value [batch, key heads, length, head_dim] of the
    new tokens alone; encoding_inputs: of `encoded`
    """
    if encoding_inputs is None:
        raise UserError(
            "attn_implementation: config.json names an encoding; call megatron.interop.use(model)"
            " after from_pretrained"
        )
    if dropout:
        raise UserError(
            f"attention_dropout: {dropout} is not offered; load the model with attention_dropout=0"
            " (GPT-2: attn_pdrop=0)"
        )
    # It computes its tables anew in each layer: where one is computed again (use_reentrant),
    # autograd runs through it alone, and could not run twice through tables that layers share.
    options = {"restart": True, "applied": APPLIED} | encoding_inputs
    return encoded(q=query, k=key, v=value, **options).transpose(1, 2), None


AttentionInterface.register(ENCODING, encoded_attention)
_FUSION_REGISTRY[ENCODING] = ModuleFusionSpec()
register_module_module_registration_hook(add_encodings)
