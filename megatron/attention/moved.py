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
ROWS = 256  # queries of a block


def attend_moved(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block_scores: BlockScores, **more: Any
) -> Tensor:
    """See megatron.attention.attention: memory grows with length, as blocks are recomputed.

    On the CPU, and with nothing but the causal mask, keys before a block go to torch's kernel.
    """
    function, tensors = block_scores
    queries = q.shape[2]
    alone = bias is None and all(option is None for option in more.values())
    if alone and q.device.type == "cpu":
        wide = torch.promote_types(v.dtype, torch.float32)
        return Moved.apply(function, queries, v.to(wide), *tensors).to(q.dtype)

    def attend_block(block: Block) -> Tensor:
        start, end = block.start, block.end
        rows, visible = slice(start, end), slice(0, block.own.stop)
        options = dict(more)
        if more["segments"] is not None:
            options["segments"] = more["segments"][:, visible]
        if more["score_bias"] is not None:
            options["score_bias"] = more["score_bias"].of_queries(start, end)

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

    The softmax over two sets of keys is the mean of both, weighted by their sums of exponentials.
    So torch's gradients of one set are right if they are given the output and the sum of both.
    """

    @staticmethod
    def forward(
        ctx: Any, function: BlockOfScores, queries: int, v: Tensor, *tensors: Tensor
    ) -> Tensor:
        batch, heads, keys, features = v.shape
        out = v.new_empty(batch, heads, queries, features)
        log_sums = v.new_empty(batch, heads, queries)
        for block in blocks(queries, keys):
            far_q, far_k, own = function(tensors, block.start, block.end)
            own = masked(own)
            largest = own.amax(dim=-1, keepdim=True)
            p = (own - largest).exp()
            total = p.sum(dim=-1, keepdim=True)
            result = p @ v[:, :, block.own] / total
            log_sum = (largest + total.log())[..., 0]
            if block.before > 0:
                far_v = as_wide(v[:, :, : block.before], far_k)
                far, far_log_sum = ATTEND(far_q, far_k, far_v, scale=1.0)
                share_of_far = (far_log_sum - log_sum).sigmoid()
                result = torch.lerp(result, far[..., :features], share_of_far[..., None])
                log_sum = torch.logaddexp(log_sum, far_log_sum)
            out[:, :, block.start : block.end] = result
            log_sums[:, :, block.start : block.end] = log_sum
        ctx.function, ctx.queries = function, queries
        ctx.save_for_backward(out, log_sums, v, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        all_out, log_sums, v, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        leaves = []
        for tensor, needed in zip(tensors, wanted, strict=True):
            leaves.append(tensor.detach().requires_grad_(needed))
        dv = torch.zeros_like(v)
        for block in blocks(ctx.queries, v.shape[2]):
            with torch.enable_grad():
                far_q, far_k, own = ctx.function(leaves, block.start, block.end)
            rows = slice(block.start, block.end)
            out, log_sum = all_out[:, :, rows], log_sums[:, :, rows]
            d = dout[:, :, rows].contiguous()
            p = (masked(own.detach()) - log_sum[..., None]).exp()
            dp = d @ v[:, :, block.own].mT
            down = p * (dp - (d * out).sum(dim=-1, keepdim=True))
            dv[:, :, block.own] += p.mT @ d
            gradients = [(own, down)]
            if block.before > 0:
                q, k = far_q.detach(), far_k.detach()
                far_v = as_wide(v[:, :, : block.before], k)
                of_out = as_wide(d, k), q, k, far_v, as_wide(out, k), log_sum
                dq, dk, dfar_v = GRADIENTS(*of_out, 0.0, False, scale=1.0)
                dv[:, :, : block.before] += dfar_v[..., : v.shape[-1]]
                gradients += [(far_q, dq), (far_k, dk)]
            reached = [pair for pair in gradients if pair[0].requires_grad]
            torch.autograd.backward([score for score, _ in reached], [down for _, down in reached])
        return None, None, dv, *(leaf.grad for leaf in leaves)


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


def masked(own: Tensor) -> Tensor:
    """Scores of a block's own keys, -inf for keys after the query: [..., rows, rows]."""
    later = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).triu(1)
    return own.masked_fill(later, -math.inf)


def as_wide(x: Tensor, keys: Tensor) -> Tensor:
    """x with zeros as further features, because torch's kernel takes keys and values alike."""
    more = keys.shape[-1] - x.shape[-1]
    return F.pad(x, (0, more)) if more else x
