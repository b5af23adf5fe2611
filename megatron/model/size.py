"""Numbers and operations of a configured model, counted without its memory.

Operations are counted as in PaLM (arXiv 2204.02311, appendix B); those of a layer with a state as
if token came after token.
A product of an [m, k] and a [k, n] matrix is 2 m k n operations: a multiplication and an addition
for each term. Norms, softmax, activations, the encoding and recomputation do not count.
PaLM lets every token attend to the whole window; a causal token attends to half of it.
`keys` is how many keys a token attends to: the window's `length` for PaLM's count, half of it for
the work that a causal mask leaves.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from megatron.model import position_of_entry
from megatron.model.block import Block
from megatron.model.gpt import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions.layers import attention_count, entries_of, layers_of_kinds
from megatron.positions.outline import Outline

if TYPE_CHECKING:  # as in megatron.model
    from megatron.config import Config

BACKWARD = 3  # a training step in forward passes: gradients of inputs and of weights cost one each


class WithoutLayers(Architecture):
    """Embedding, final norm and output of a GPT."""

    @property
    def kinds(self) -> list[str]:
        return []


def blocks(model: Architecture) -> Iterator[tuple[int, Block]]:
    """A block of each kind and how many the model has: num_layers may be a typing error."""
    with torch.random.fork_rng(devices=[]), Outline():
        for kind, layers in layers_of_kinds(model).items():
            yield layers, Block(model, kind)


def weights(model: Architecture, vocab: int) -> Iterator[tuple[int, nn.Parameter]]:
    """Every learned tensor that is no encoding's and how often the model has it.

    Without the rows looked up in an input embedding of its own.
    """
    with torch.random.fork_rng(devices=[]), Outline():
        ends = GPT(WithoutLayers(**vars(model)), AttentionSettings(), positions=[], vocab=vocab)
    for name, parameter in ends.named_parameters():
        if not (model.no_weight_tying and name == "word_embeddings.weight"):
            yield 1, parameter
    for layers, block in blocks(model):
        for parameter in block.parameters():
            yield layers, parameter


def matrix_weights(model: Architecture, vocab: int) -> int:
    """Numbers in the matrices and convolutions that multiply every token.

    The rows looked up in the input embedding do not multiply.
    """
    return sum(
        count * weight.numel() for count, weight in weights(model, vocab) if weight.dim() > 1
    )


def palm_weights(model: Architecture, vocab: int) -> int:
    """PaLM's N: `matrix_weights` with biases, norms and sinks; without the looked-up embedding.

    PaLM's two embeddings are one matrix, which its N counts once.
    """
    return sum(count * weight.numel() for count, weight in weights(model, vocab))


def attention_flops(model: Architecture, keys: float) -> float:
    """Operations of one token's scores and weighted sums, or states, in all layers, forward."""
    return sum(layers * block.attention.operations(keys) for layers, block in blocks(model))


def forward_flops(model: Architecture, vocab: int, keys: float) -> float:
    """Operations of one token, forward: two for each weight of a matrix, and attention."""
    return 2 * matrix_weights(model, vocab) + attention_flops(model, keys)


class Parameters(NamedTuple):
    """Learned numbers of a model. positions: those of its encodings, which `whole` includes."""

    whole: int
    positions: int


def parameters(config: "Config", vocab: int) -> Parameters:
    """The numbers of `from_config(config, vocab)`, in a few milliseconds and without its memory.

    Raises UserError if the encoding refuses its options.
    """
    model = Architecture.of(config.model)
    entries = entries_of(config.position)
    position_numbers = 0
    with torch.random.fork_rng(devices=[]), Outline():
        attending = attention_count(model)
        for index, entry in enumerate(entries[:attending]):
            position = position_of_entry(config, entry)
            numbers = sum(parameter.numel() for parameter in position.parameters())
            if position.per_layer or not config.position.pos_emb_shared:
                numbers *= len(range(index, attending, len(entries)))
            elif entry in entries[:index]:
                numbers = 0  # its layers share the first equal encoding
            position_numbers += numbers
    looked_up = vocab * model.hidden_size if model.no_weight_tying else 0
    whole = palm_weights(model, vocab) + looked_up + position_numbers
    return Parameters(whole, position_numbers)
