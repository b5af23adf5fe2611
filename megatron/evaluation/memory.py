"""The memory of an evaluation, estimated before there is a model.

Nothing is kept for a backward pass, so one layer and the logits of one block of tokens count:

    weights       4 bytes of each number (2 with --dtype bf16)
    activations   the residual stream, and the larger one of attention and of the MLP, per token
    scores        with an encoding that changes them (`on_scores`), all of a batch, several times
    logits        of the tokens whose logits exist at one time, with their softmax in float32

On the CPU the peaks of evaluations of nine small models (193 MB to 1.2 GB estimated) were 1.0 to
1.4 times it. With `on_scores` 12 copies of the scores are counted and 6 to 30 were found, so that
the scores take 0.5 to 2.5 times what is counted. On a GPU nothing has been measured.
"""

import torch

from megatron.model import Architecture
from megatron.model.head import tokens_at_once

FLOAT32 = 4
STREAM = 3  # numbers per token and feature: the stream, the layer's input after the norm, its sum
SCORES = 12  # copies of all scores: CoPE has about 12, stick-breaking 6, DAPE 23, DAPE v2 30
LOGITS = 2  # in float32: themselves and their softmax


def evaluation_memory(
    model: Architecture,
    vocab: int,
    numbers: int,
    length: int,
    *,
    batch_tokens: int,
    device: torch.device,
    dense: bool,
    number: int = FLOAT32,
) -> int:
    """Bytes of one device while windows of `length` tokens are measured.

    vocab: rows of the embedding; numbers: all learned numbers of the model
    batch_tokens: tokens of a forward pass, one window at least
    dense: whether the encoding changes all scores of a batch at once
    number: bytes of a weight or an activation
    """
    windows = max(1, batch_tokens // length)
    tokens = windows * length
    # The projections, their copies with the encoding, and the output.
    attention = 2 * model.projected_width + 2 * model.attention_width
    feed_forward = model.widened + model.mlp_width
    of_token = STREAM * model.hidden_size + max(attention, feed_forward)
    layer = number * tokens * (of_token - model.hidden_size)
    if dense:
        layer += SCORES * FLOAT32 * windows * model.num_attention_heads * length**2
    at_once = min(tokens, tokens_at_once(device))
    logits = LOGITS * FLOAT32 * at_once * vocab
    weights = number * numbers
    stream = number * tokens * model.hidden_size
    return weights + stream + max(layer, logits)  # the logits come after all layers
