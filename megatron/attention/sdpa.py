"""Attention through torch's scaled_dot_product_attention, with a bias in blocks of queries."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.blocked import Blocked, Scope, in_blocks
from megatron.attention.content import ScoreBias


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    weight: Tensor | None,
    window: int | None,
    chunk: int | None,
    segments: Tensor | None,
    index_bias: Callable[[Tensor, Tensor], Tensor] | None,
    score_bias: ScoreBias | None = None,
) -> Tensor:
    """See megatron.attention.attention.

    Memory grows with length; with an index_bias that learns, with queries · keys.
    """
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and window >= keys:
        window = None  # it masks nothing
    if chunk is not None and 2 * chunk >= keys:
        chunk = None
    options = (bias, weight, window, chunk, segments, index_bias, score_bias)
    plain_causal = all(option is None for option in options)
    if plain_causal:
        if queries == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if queries == 1:
            return F.scaled_dot_product_attention(q, k, v)
    scope = Scope(queries, keys, window, chunk)
    learned_bias = bias is not None and bias.requires_grad
    fused = weight is None and segments is None and not learned_bias
    half_precision = q.dtype in (torch.float16, torch.bfloat16)
    # Only autograd finds the parameters of an index bias. And for a frozen table in half precision
    # the gradients of torch's kernel are faster than ours: at 2048 and 4096 they take 1.1 times as
    # long as those without a bias, ours 1.3 times.
    if index_bias is not None or (fused and half_precision and score_bias is None):
        return in_blocks(q, k, v, bias, weight, segments, scope, index_bias, score_bias)
    u, w = (None, None) if score_bias is None else (score_bias.u, score_bias.w)
    return Blocked.apply(q, k, v, bias, weight, segments, u, w, scope)
