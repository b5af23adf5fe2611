"""Numbers and operations of a configured model, counted without its memory.

Operations are counted as in PaLM (arXiv 2204.02311, appendix B); those of a layer with a state as
if token came after token.
A product of an [m, k] and a [k, n] matrix is 2 m k n operations: a multiplication and an addition
for each term. Norms, softmax, activations, the encoding and recomputation do not count.
PaLM lets every token attend to the whole window; a causal token attends to half of it.
`keys` is how many keys a token attends to: the window's `length` for PaLM's count,
`causal_pairs(length) / length` for the work that a causal mask leaves.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron.model import position_of_entry
from megatron.model.block import LAYERS
from megatron.model.settings import Architecture
from megatron.positions.layers import (
    ATTENTION,
    LATENT,
    attention_count,
    entries_of,
    layers_of_kinds,
)
from megatron.positions.outline import Outline

if TYPE_CHECKING:  # as in megatron.model
    from megatron.config import Config

BACKWARD = 3  # a training step in forward passes: gradients of inputs and of weights cost one each
PER_STATE = 6  # operations of a number of the state: a key's value, the update, the query's value
PER_PAIR = 4  # operations of a query, a key and a feature: the score and the weighted sum, 2 each


def matrix_weights(model: Architecture, vocab: int) -> int:
    """Numbers in the matrices and convolutions that multiply every token.

    Each layer of the papers' GPT has 4 hidden² in attention and 8 hidden² in its feed-forward part,
    in the place of attention a gated_delta layer has 5 hidden², a kda layer 4, beside their gates
    and convolution; the output matrix has vocab * hidden. The rows looked up in the input embedding
    do not multiply.
    """
    attention = model.projected_width + model.attention_width
    feed_forward = model.widened + model.mlp_width
    layer_weights = layers_of_kinds(model)[ATTENTION] * attention + model.num_layers * feed_forward
    return model.hidden_size * (layer_weights + vocab) + other_weights(model)[0]


def other_weights(model: Architecture) -> tuple[int, int]:
    """Numbers in the matrices and convolutions of all layers but attention, and their others."""
    matrices = vectors = 0
    for kind, layers in layers_of_kinds(model).items():
        if kind != ATTENTION:
            with torch.device("meta"):
                parameters = [*LAYERS[kind](model).parameters()]
            for parameter in parameters:
                if parameter.dim() > 1:
                    matrices += layers * parameter.numel()
                else:
                    vectors += layers * parameter.numel()
    return matrices, vectors


def palm_weights(model: Architecture, vocab: int) -> int:
    """PaLM's N: `matrix_weights` with biases, norms and sinks; without the looked-up embedding.

    PaLM's two embeddings are one matrix, which its N counts once.
    """
    hidden, norm_numbers = model.hidden_size, model.numbers_of_norm
    attention = 0
    if model.use_bias_in_attn_linear:
        attention += model.projected_width
    if model.bias_in_attn_output:
        attention += hidden
    if model.softmax_type == "learnable":
        attention += model.num_attention_heads
    if model.qk_norm:
        heads = model.query_heads + model.key_heads if model.qk_norm == "full" else 2
        attention += norm_numbers * heads * model.features_of_head
    layer_vectors = norm_numbers * model.norms_of_layer * hidden
    if model.use_bias_in_mlp:
        layer_vectors += model.widened + hidden
    small = layers_of_kinds(model)[ATTENTION] * attention + other_weights(model)[1]
    small += model.num_layers * layer_vectors
    small += norm_numbers * hidden * (1 + int(model.embedding_norm))
    small += vocab * int(model.use_bias_in_output)
    return matrix_weights(model, vocab) + small


def attention_flops(model: Architecture, keys: float) -> float:
    """Operations of one token's scores and weighted sums, or states, in all layers, forward."""
    layers = layers_of_kinds(model)
    _, encoded, plain, values = model.latent_sizes
    latent_width = model.num_attention_heads * (plain + encoded + values) / 2
    width = layers[ATTENTION] * model.attention_width + layers[LATENT] * latent_width
    _, heads, key_dim, value_dim = model.delta_sizes
    states = model.num_layers - attention_count(model)
    return PER_PAIR * keys * width + PER_STATE * states * heads * key_dim * value_dim


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
