"""Attention through torch's scaled_dot_product_attention, with a bias in blocks of queries.

Blocks read the distance table in place, so no bias is copied. Keys that no query of the block
attends to are skipped (`scope`), as are those that would get nothing (`first_keys`). Nothing of
size queries · keys ever exists: gradients are recomputed block by block (`blocked_gradients`).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention.blocked_gradients import gradients
from megatron.attention.eager import BlockScores, ScoreBias, product
from megatron.attention.first_keys import FirstKeys, first_keys, groups_of_heads
from megatron.attention.moved import attend_moved
from megatron.attention.scope import BLOCK, Inputs, Scope, of_heads

MOST_SCORES = 2**23
"""Scores that exist at once where a view of the table is not enough: 32 MiB."""
CACHED_SCORES = 2**18
"""Scores of some heads that a core fills and reads at once: 1 MiB, as its cache."""
# cuDNN's kernel has given NaN gradients under a mask (pytorch#196678).
KERNELS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LARGE_BLOCK = 1024
"""Queries of a block for which torch's kernel is fastest where a bias is by content alone."""


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
    block_scores: BlockScores | None = None,
) -> Tensor:
    """See megatron.attention.attention.

    Memory grows with length; with an index_bias that learns, with queries · keys.
    """
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and window >= keys:
        window = None  # it masks nothing
    if chunk is not None and 2 * chunk >= keys:
        chunk = None
    if block_scores is not None:
        more = {"weight": weight, "window": window, "chunk": chunk, "segments": segments}
        more |= {"index_bias": index_bias, "score_bias": score_bias}
        return attend_moved(q, k, v, bias, block_scores, **more)
    options = (bias, weight, window, chunk, segments, index_bias, score_bias)
    plain_causal = all(option is None for option in options)
    if plain_causal:
        if queries == keys:
            return _fused(q, k, v, is_causal=True)
        if queries == 1:
            return _fused(q, k, v, is_causal=False)
    scope = Scope(queries, keys, window, chunk)
    inputs = Inputs(q, k, v, bias, weight, segments, scope, index_bias, score_bias)
    # Torch's kernel under autograd is faster than our gradients for a frozen table in half
    # precision: 1.1 times as long as without a bias at 2048 and 4096, ours 1.3 times.
    frozen = bias is None or not bias.requires_grad
    fused = frozen and weight is None and segments is None and score_bias is None
    fused = fused and q.dtype in (torch.float16, torch.bfloat16)
    # Only autograd finds the parameters of an index bias.
    if index_bias is not None or fused:
        return in_blocks(inputs)
    u, w = (None, None) if score_bias is None else (score_bias.u, score_bias.w)
    return Blocked.apply(scope, q, k, v, bias, weight, segments, u, w)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's kernel. On the CPU it takes values as wide as keys alone, and others without it."""
    features, wider = v.shape[-1], k.shape[-1] - v.shape[-1]
    if wider == 0 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, **options)
    padded = F.pad(v, (0, wider))
    return F.scaled_dot_product_attention(q, k, padded, **options)[..., :features]


def in_blocks(inputs: Inputs, firsts: FirstKeys | None = None) -> Tensor:
    """See megatron.attention.attention. Under autograd every block's scores are kept."""
    recorded = torch.is_grad_enabled()
    content, scope = inputs.score_bias, inputs.scope
    if content is not None and inputs.content_alone and not recorded:
        return attend_by_content(inputs, content, firsts)
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, heads = q.shape[:2]
    bias, weight = scope.reversed_tables(inputs.bias, inputs.weight, k)

    rows = min(inputs.exact_rows(BLOCK), scope.queries)
    some_heads = inputs.on_cpu and inputs.index_bias is None  # may be computed before others
    together = batch if some_heads else batch * heads
    plain = weight is None and content is None and inputs.segments is None
    if not plain or inputs.index_bias is not None:  # not a view of a table
        rows = min(rows, max(1, MOST_SCORES // (together * scope.keys)))
    if scope.queries > rows:
        # Every block reads them: where they are views of a fused projection, a copy pays.
        k, v = k.contiguous(), v.contiguous()
    cached = CACHED_SCORES * torch.get_num_threads()
    # Numbers to be overwritten by biases of content, which then have no gradient. Memory that the
    # system gives anew for each block takes nine times as long to fill.
    room = None
    if content is not None and not recorded:
        room = bias.new_empty(max(cached, together * rows * scope.keys))
    of_each_head = weight is not None or content is not None
    of_each_head = of_each_head or (inputs.segments is not None and inputs.bias is not None)
    most = cached // batch if some_heads and of_each_head else None

    outputs = []
    for block in scope.blocks(rows):
        outputs_of_heads = []
        for group, part in groups_of_heads(block, heads, firsts, most):
            added = part.view(of_heads(bias, group))[None]  # [1, heads or 1, rows, columns]
            if inputs.index_bias is not None:
                added = added + inputs.index_bias(*part.indices(scope, q.device))
            if content is not None:
                u, w = content.of_heads(group).relative(part.queries, part.keys, added.dtype)
                out = None
                if room is not None:
                    shape = (*w.shape[:2], *added.shape[2:])
                    out = room[: math.prod(shape)].view(shape)
                if u is not None and u.shape[-1] == 1:  # in one pass
                    added = torch.addcmul(added, u.flip(2), w.mT, out=out)
                else:
                    of_content = product(None if u is None else u.flip(2), w)
                    added = torch.add(added, of_content, out=out)
            if inputs.segments is not None:
                masked = part.mask(scope, inputs.segments)
                fill = added.masked_fill if room is None else added.masked_fill_
                added = fill(masked, -math.inf)
            factor = None if weight is None else part.view(weight[group])
            tile_q = q[:, group, part.queries].flip(2)
            tile_k, tile_v = k[:, group, part.keys], v[:, group, part.keys]
            outputs_of_heads.append(_attend(tile_q, tile_k, tile_v, added, factor).flip(2))
        outputs.append(torch.cat(outputs_of_heads, dim=1))
    return torch.cat(outputs, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor, factor: Tensor | None) -> Tensor:
    """One block: softmax(factor · q·k/√head_dim + added) v, [batch, heads, rows, features of v]."""
    if factor is not None:  # a factor is not additive, so no fused kernel computes it
        wide = added.dtype
        products = q.to(wide) @ k.to(wide).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = products * factor + added
        out = scores.softmax(dim=-1) @ v.to(wide)
        return out.to(q.dtype)
    if q.device.type == "cpu":
        return _fused(q, k, v, attn_mask=added)
    # CUDA's kernels need aligned rows in q's dtype. Copy first: then gradients add up in float32.
    with sdpa_kernel(KERNELS_WITH_MASK):
        aligned = added.contiguous().to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned)


class Blocked(torch.autograd.Function):
    """`in_blocks`, without index_bias; its gradients take memory in proportion to length."""

    @staticmethod
    def forward(ctx: Any, scope: Scope, *tensors: Any) -> Tensor:
        inputs = Inputs.of(scope, *tensors)
        ctx.scope, ctx.firsts = scope, first_keys(inputs)
        out = in_blocks(inputs, ctx.firsts)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out = ctx.saved_tensors
        inputs = Inputs.of(ctx.scope, *tensors)
        wanted = ctx.needs_input_grad[4:6]
        *of_tensors, du, dw = gradients(inputs, out, dout, ctx.firsts, wanted)
        return None, *of_tensors, None, du, dw


def attend_by_content(inputs: Inputs, score_bias: ScoreBias, firsts: FirstKeys | None) -> Tensor:
    """Causal attention whose only bias is by content, on the CPU: no mask is ever filled.

    The keys before a block are visible to all of its queries, and its own keys are under torch's
    causal mask. So both parts go to torch's kernel as they are, and their outputs are merged. A
    number for each key alone is one row, which all queries of a block read. A product u·w is one
    more feature of queries and keys. `inputs.content_alone` must hold, autograd be off.
    """
    batch, heads, queries, head_dim = inputs.q.shape
    features = inputs.v.shape[-1]
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    k = inputs.k
    if score_bias.u is not None:
        k = F.pad(k, (0, score_bias.features))
    v = F.pad(inputs.v, (0, k.shape[-1] - features)).contiguous()
    k = k.contiguous()
    out = inputs.v.new_empty(batch, heads, queries, features)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    scale = 1 / math.sqrt(head_dim)

    for block in inputs.scope.blocks(inputs.exact_rows(LARGE_BLOCK)):
        for group, part in groups_of_heads(block, heads, firsts):
            q = inputs.q[:, group, part.queries]
            u, w = score_bias.of_heads(group).relative(part.queries, part.keys, wide)
            keys, values = k[:, group, part.keys], v[:, group, part.keys]
            masks: list[Tensor | None] = [None, None]  # of the keys before, and of the block's own
            before = part.columns - part.rows
            if u is None:
                added = w.sum(-1)[:, :, None].expand(-1, -1, part.rows, -1)
                masks = [added[..., :before], added[..., before:]]
            else:
                # The kernel divides all features by √head_dim.
                q = torch.cat([q, u * math.sqrt(head_dim)], dim=-1)
                keys[..., -w.shape[-1] :] = w
            own_keys, own_values = keys[:, :, before:], values[:, :, before:]
            # Outputs, and logarithms of their sums of exponentials.
            result, log_sum = kernel(
                q, own_keys, own_values, is_causal=True, attn_mask=masks[1], scale=scale
            )
            if before > 0:
                far_keys, far_values = keys[:, :, :before], values[:, :, :before]
                far, far_log_sum = kernel(q, far_keys, far_values, attn_mask=masks[0], scale=scale)
                share_of_far = (far_log_sum - log_sum).sigmoid()[..., None]
                dtype = share_of_far.dtype
                result = torch.lerp(result.to(dtype), far.to(dtype), share_of_far)
            out[:, group, block.queries] = result[..., :features].to(inputs.q.dtype)
    return out
