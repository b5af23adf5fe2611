"""Numbers and operations of a configured model, counted without building it.

Operations are counted as in PaLM (arXiv 2204.02311, appendix B).
A product of an [m, k] and a [k, n] matrix is 2 m k n operations: a multiplication and an addition
for each term. Norms, softmax, activations, the encoding and recomputation do not count.
PaLM lets every token attend to the whole window; a causal token attends to half of it.
`keys` is how many keys a token attends to: the window's `length` for PaLM's count,
`causal_pairs(length) / length` for the work that a causal mask leaves.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron.model import position_of_entry
from megatron.model.settings import Architecture
from megatron.positions.layers import entries_of
from megatron.positions.outline import Outline

if TYPE_CHECKING:  # as in megatron.model
    from megatron.config import Config

BACKWARD = 3  # a training step in forward passes: gradients of inputs and of weights cost one each
PER_PAIR = 4  # operations of a query, a key and a feature: the score and the weighted sum, 2 each


def matrix_weights(model: Architecture, vocab: int) -> int:
    """Numbers in the matrices that multiply every token.

    Each layer of the papers' GPT has 4 hidden² in attention and 8 hidden² in its feed-forward part;
    the output matrix has vocab * hidden. The rows looked up in the input embedding do not multiply.
    """
    attention = model.projected_width + model.attention_width
    feed_forward = model.widened + model.mlp_width
    return model.hidden_size * (model.num_layers * (attention + feed_forward) + vocab)


def palm_weights(model: Architecture, vocab: int) -> int:
    """PaLM's N: `matrix_weights` with biases and norms; without the looked-up embedding.

    PaLM's two embeddings are one matrix, which its N counts once.
    """
    hidden = model.hidden_size
    biases = 0
    if model.use_bias_in_attn_linear:
        biases += model.projected_width
    if model.bias_in_attn_output:
        biases += hidden
    if model.use_bias_in_mlp:
        biases += model.widened + hidden
    normed_in_layer = 2 * hidden
    if model.qk_norm:
        normed_in_layer += 2 * model.features_of_head
    of_feature = 2 if model.norm_has_bias else 1
    norms = of_feature * (model.num_layers * normed_in_layer + hidden)
    return matrix_weights(model, vocab) + model.num_layers * biases + norms


def attention_flops(model: Architecture, keys: float) -> float:
    """Operations of one token's scores and weighted sums in all layers, forward."""
    return PER_PAIR * model.num_layers * model.attention_width * keys


def forward_flops(model: Architecture, vocab: int, keys: float) -> float:
    """Operations of one token, forward: two for each weight of a matrix, and attention."""
    return 2 * matrix_weights(model, vocab) + attention_flops(model, keys)


def causal_pairs(length: int) -> int:
    """Pairs of a query and a key in a causal window, a token's own key included."""
    return length * (length + 1) // 2


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
    of_positions = 0
    with torch.random.fork_rng(devices=[]), Outline():
        for index, entry in enumerate(entries[: model.num_layers]):
            position = position_of_entry(config, entry)
            numbers = sum(parameter.numel() for parameter in position.parameters())
            if position.per_layer or not config.position.pos_emb_shared:
                numbers *= len(range(index, model.num_layers, len(entries)))
            elif entry in entries[:index]:
                numbers = 0  # its layers share the first equal encoding
            of_positions += numbers
    looked_up = vocab * model.hidden_size if model.no_weight_tying else 0
    whole = palm_weights(model, vocab) + looked_up + of_positions
    return Parameters(whole, of_positions)
