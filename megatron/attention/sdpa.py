"""Attention through torch's scaled_dot_product_attention, with a bias in blocks of queries."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.blocked import Blocked, in_blocks
from megatron.attention.content import ScoreBias
from megatron.attention.first_keys import Pairs
from megatron.attention.inputs import Inputs
from megatron.attention.scope import Scope


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
    pairs: Pairs | None = None,
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
            return _fused(q, k, v, is_causal=True)
        if queries == 1:
            return _fused(q, k, v, is_causal=False)
    scope = Scope(queries, keys, window, chunk)
    # Only autograd finds the parameters of an index bias.
    if index_bias is not None or _has_better_gradients(q, bias, weight, segments, score_bias):
        return in_blocks(Inputs(q, k, v, bias, weight, segments, scope, index_bias, score_bias))
    u, w = (None, None) if score_bias is None else (score_bias.u, score_bias.w)
    return Blocked.apply(q, k, v, bias, weight, segments, u, w, scope, pairs)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """torch's kernel. On the CPU it takes values as wide as keys alone, and others without it."""
    features, wider = v.shape[-1], k.shape[-1] - v.shape[-1]
    if wider == 0 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    padded = F.pad(v, (0, wider))
    return F.scaled_dot_product_attention(q, k, padded, is_causal=is_causal)[..., :features]


def _has_better_gradients(
    q: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    segments: Tensor | None,
    score_bias: ScoreBias | None,
) -> bool:
    """Whether torch's kernel under autograd is faster than our gradients.

    It is for a frozen table in half precision: at 2048 and 4096 its gradients take 1.1 times as
    long as those without a bias, ours 1.3 times.
    """
    learned_bias = bias is not None and bias.requires_grad
    fused = weight is None and segments is None and score_bias is None and not learned_bias
    return fused and q.dtype in (torch.float16, torch.bfloat16)
