"""Floating point operations of the model, as PaLM counts them (arXiv 2204.02311, appendix B).

A product of an [m, k] and a [k, n] matrix is 2 m k n operations: a multiplication and an addition
for each term. Norms, softmax, activations, the encoding and recomputation do not count.
PaLM lets every token attend to the whole window; a causal token attends to half of it.
`keys` is how many keys a token attends to: the window's `length` for PaLM's count,
`causal_keys(length)` for the work that a causal mask leaves.
"""

BACKWARD = 3  # a training step in forward passes: gradients of inputs and of weights cost one each
PER_PAIR = 4  # operations of a query, a key and a feature: the score and the weighted sum, 2 each


def matrix_weights(layers: int, hidden: int, vocab: int) -> int:
    """Numbers in the matrices that multiply every token.

    Each layer has 4 hidden² in attention and 8 hidden² in its feed-forward part; the output matrix
    has vocab * hidden. The rows looked up in the input embedding do not multiply.
    """
    return 12 * layers * hidden**2 + vocab * hidden


def palm_weights(layers: int, hidden: int, vocab: int) -> int:
    """PaLM's N: `matrix_weights` with biases and norms; without the looked-up embedding.

    PaLM's two embeddings are one matrix, which its N counts once.
    """
    biases_and_norms = 13 * layers * hidden + 2 * hidden
    return matrix_weights(layers, hidden, vocab) + biases_and_norms


def attention_flops(layers: int, hidden: int, keys: float) -> float:
    """Operations of one token's scores and weighted sums in all layers, forward."""
    return PER_PAIR * layers * hidden * keys


def forward_flops(layers: int, hidden: int, vocab: int, keys: float) -> float:
    """Operations of one token, forward: two for each weight of a matrix, and attention."""
    products = 2 * matrix_weights(layers, hidden, vocab)
    return products + attention_flops(layers, hidden, keys)


def causal_pairs(length: int) -> int:
    """Pairs of a query and a key in a causal window, a token's own key included."""
    return length * (length + 1) // 2


def causal_keys(length: int) -> float:
    """Keys that a token of a causal window attends to, on average."""
    return causal_pairs(length) / length
