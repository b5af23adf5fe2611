"""Attention whose scores an encoding gives block by block, such as PaTH's (`block_scores`)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron.attention.eager import BlockOfScores, BlockScores, eager

ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
GRADIENTS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ROWS = 256  # queries of a block; encodings rely on it (`Position.block_scores`)


def attend_moved(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block_scores: BlockScores, **more: Any
) -> Tensor:
    """See megatron.attention.attention: memory grows with length, as blocks are recomputed.

    On the CPU, with the causal mask and at most a bias for each key, keys before a block go to
    torch's kernel.
    """
    function, tensors = block_scores
    queries = q.shape[2]
    others = [bias, *(option for name, option in more.items() if name != "score_bias")]
    content = more["score_bias"]
    one_for_each_key = content is None or (content.u is None and content.w.shape[3] == 1)
    if q.device.type == "cpu" and one_for_each_key and all(option is None for option in others):
        wide = torch.promote_types(v.dtype, torch.float32)
        w = None if content is None else content.w[..., 0]
        with torch.autocast("cpu", enabled=False):
            return Moved.apply(function, queries, v.to(wide), w, *tensors).to(q.dtype)

    def attend_block(block: Block) -> Tensor:
        start, end = block.start, block.end
        rows, visible = slice(start, end), slice(0, block.own.stop)
        options = dict(more)
        if more["segments"] is not None:
            options["segments"] = more["segments"][:, visible]
        if more["score_bias"] is not None:
            options["score_bias"] = more["score_bias"].of_queries(rows, visible.stop)

        def of_block(tensors: Sequence[Tensor], *_: int) -> tuple[Tensor, Tensor, Tensor]:
            return function(tensors, start, end)

        options["block_scores"] = of_block, tensors
        return eager(q[:, :, rows], k[:, :, visible], v[:, :, visible], bias, **options)

    outputs = []
    for block in blocks(queries, k.shape[2]):
        outputs.append(checkpoint(attend_block, block, use_reentrant=False))
    return torch.cat(outputs, dim=2)


class Moved(torch.autograd.Function):
    """Causal attention in blocks of queries, whose scores the gradients compute again.

    w [batch, heads, keys]: what is added to all scores of a key, or None.

    The softmax over two sets of keys is the mean of both, weighted by their sums of exponentials.
    So torch's gradients of one set are right if they are given the output and the sum of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: BlockOfScores,
        queries: int,
        v: Tensor,
        w: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        batch, heads, keys, features = v.shape
        out = v.new_empty(batch, heads, queries, features)
        log_sums = v.new_empty(batch, heads, queries)
        for block in blocks(queries, keys):
            far_q, far_k, own = function(tensors, block.start, block.end)
            far_bias, own_bias = biases(w, block, own.dtype)
            p = masked(own, own_bias)
            largest = p.amax(dim=-1, keepdim=True)
            p.sub_(largest).exp_()
            total = p.sum(dim=-1, keepdim=True)
            result = (p @ v[:, :, block.own]).div_(total)
            log_sum = (largest + total.log())[..., 0]
            if block.before > 0:
                far_v = as_wide(v[:, :, : block.before], far_k)
                far, far_log_sum = ATTEND(far_q, far_k, far_v, attn_mask=far_bias, scale=1.0)
                share_of_far = (far_log_sum - log_sum).sigmoid()
                result = torch.lerp(result, far[..., :features], share_of_far[..., None])
                log_sum = torch.logaddexp(log_sum, far_log_sum)
            out[:, :, block.start : block.end] = result
            log_sums[:, :, block.start : block.end] = log_sum
        ctx.function, ctx.queries = function, queries
        ctx.save_for_backward(out, log_sums, v, w, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        all_out, log_sums, v, w, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        leaves = []
        for tensor, needed in zip(tensors, wanted, strict=True):
            leaves.append(tensor.detach().requires_grad_(needed))
        dv = torch.zeros_like(v)
        dw = None if w is None else torch.zeros_like(w)
        wide_v = v if w is None else F.pad(v, (0, 1))
        for block in blocks(ctx.queries, v.shape[2]):
            with torch.enable_grad():
                far_q, far_k, own = ctx.function(leaves, block.start, block.end)
            far_bias, own_bias = biases(w, block, own.dtype)
            rows = slice(block.start, block.end)
            out, log_sum = all_out[:, :, rows], log_sums[:, :, rows]
            d = dout[:, :, rows].contiguous()
            p = masked(own.detach(), own_bias).sub_(log_sum[..., None]).exp_()
            dv[:, :, block.own] += p.mT @ d
            dp = d @ v[:, :, block.own].mT
            down = dp.sub_((d * out).sum(dim=-1, keepdim=True)).mul_(p)
            if dw is not None:
                dw[:, :, block.own] += down.sum(dim=2)
            gradients = [(own, down)]
            if block.before > 0:
                q, k = far_q.detach(), far_k.detach()
                if far_bias is not None:  # as a product, because masks get no gradient
                    q = F.pad(q, (0, 1), value=1.0)
                    k = torch.cat([k, far_bias.mT], dim=-1)
                far_v = as_wide(wide_v[:, :, : block.before], k)
                of_out = as_wide(d, k), q, k, far_v, as_wide(out, k), log_sum
                dq, dk, dfar_v = GRADIENTS(*of_out, 0.0, False, scale=1.0)
                dv[:, :, : block.before] += dfar_v[..., : v.shape[-1]]
                if dw is not None:
                    dw[:, :, : block.before] += dk[..., -1]
                    dq, dk = dq[..., :-1], dk[..., :-1]
                gradients += [(far_q, dq), (far_k, dk)]
            reached = [pair for pair in gradients if pair[0].requires_grad]
            torch.autograd.backward([score for score, _ in reached], [down for _, down in reached])
        return None, None, dv, dw, *(leaf.grad for leaf in leaves)


class Block(NamedTuple):
    """Queries start … end - 1, how many keys are before them, and where their own keys are."""

    start: int
    end: int
    before: int
    own: slice


def blocks(queries: int, keys: int) -> Iterator[Block]:
    """All blocks of the last `queries` keys' queries."""
    for start in range(0, queries, ROWS):
        end = min(start + ROWS, queries)
        before = keys - queries + start
        yield Block(start, end, before, slice(before, before + end - start))


def biases(
    w: Tensor | None, block: Block, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Biases of the keys before a block [batch, heads, 1, keys], and of its own keys.

    Each is w less the w of the block's last key, so that float32 holds what differs between
    neighbours.
    """
    if w is None:
        return None, None
    w = w[:, :, None, : block.own.stop]
    near = (w - w[..., -1:]).to(dtype)
    return near[..., : block.before], near[..., block.before :]


def masked(own: Tensor, bias: Tensor | None) -> Tensor:
    """A copy of a block's own scores, with the bias and -inf for keys after the query.

    own [batch, heads, rows, rows], bias [batch, heads, 1, rows] -> as own
    """
    later = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).triu(1)
    own = own.clone() if bias is None else own + bias
    return own.masked_fill_(later, -math.inf)


def as_wide(x: Tensor, keys: Tensor) -> Tensor:
    """x with zeros as further features, because torch's kernel takes keys and values alike."""
    more = keys.shape[-1] - x.shape[-1]
    return F.pad(x, (0, more)) if more else x
