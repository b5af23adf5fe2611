"""Attention in blocks of queries that read the distance table in place.

No bias is copied, and keys that no query of the block attends to are skipped (`scope`), as are
those that would get nothing (`first_keys`). Nothing of size queries · keys ever exists: gradients
are recomputed block by block (`blocked_gradients`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention.blocked_content import attend_by_content
from megatron.attention.blocked_gradients import gradients
from megatron.attention.content import ScoreBias, plus_content
from megatron.attention.first_keys import FirstKeys, groups_of_heads
from megatron.attention.inputs import Inputs
from megatron.attention.scope import BLOCK, Block, of_heads

MOST_SCORES = 2**23
"""Scores that exist at once where a view of the table is not enough: 32 MiB."""
CACHED_SCORES = 2**18
"""Scores of some heads that a core fills and reads at once: 1 MiB, as its cache."""
# cuDNN's kernel has given NaN gradients under a mask (pytorch#196678).
KERNELS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def in_blocks(inputs: Inputs, firsts: FirstKeys | None = None) -> Tensor:
    """See megatron.attention.attention. Under autograd every block's scores are kept."""
    if inputs.content_alone and not torch.is_grad_enabled():
        return attend_by_content(inputs, firsts)
    inputs_of_blocks = _Blocks.of(inputs)
    outputs = []
    for block in inputs.scope.blocks(inputs_of_blocks.rows):
        parts = inputs_of_blocks.parts(block, firsts)
        outputs_of_heads = [inputs_of_blocks.attend(heads, part) for heads, part in parts]
        outputs.append(torch.cat(outputs_of_heads, dim=1))
    return torch.cat(outputs, dim=2)


@dataclass(frozen=True)
class _Blocks:
    """How blocks of queries, and groups of heads, are computed.

    bias, weight: as `Block.view` reads them, in float32 or wider;
    rows: how many queries a block has at most;
    room: numbers to be overwritten by biases of content, None under autograd
    """

    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    weight: Tensor | None
    rows: int
    room: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs) -> "_Blocks":
        q, k, v, scope = inputs.q, inputs.k, inputs.v, inputs.scope
        bias, weight = scope.reversed_tables(inputs.bias, inputs.weight, k)
        rows = min(inputs.exact_rows(BLOCK), scope.queries)
        together = q.shape[0] if inputs.in_groups_of_heads else q.shape[0] * q.shape[1]
        if not inputs.in_view:
            rows = min(rows, max(1, MOST_SCORES // (together * scope.keys)))
        if scope.queries > rows:
            # Every block reads them: where they are views of a fused projection, a copy pays.
            k, v = k.contiguous(), v.contiguous()
        recorded = torch.is_grad_enabled()
        room = None
        if inputs.score_bias is not None and not recorded:
            most = max(CACHED_SCORES * torch.get_num_threads(), together * rows * scope.keys)
            room = bias.new_empty(most)
        return cls(inputs, q, k, v, bias, weight, rows, room)

    def parts(self, block: Block, firsts: FirstKeys | None) -> Iterator[tuple[slice, Block]]:
        """Heads that are computed together, and the block with the keys that they attend to."""
        for group, part in groups_of_heads(block, self.q.shape[1], firsts):
            step = self._heads_together(part)
            for head in range(group.start, group.stop, step):
                yield slice(head, min(head + step, group.stop)), part

    def _heads_together(self, part: Block) -> int:
        """Heads whose scores fit the caches; all, where no numbers of their own are computed."""
        inputs = self.inputs
        heads = self.q.shape[1]
        if not (inputs.in_groups_of_heads and inputs.differs_by_head):
            return heads
        scores_of_a_head = self.q.shape[0] * part.rows * part.columns
        cached = CACHED_SCORES * torch.get_num_threads()
        return min(heads, max(1, cached // scores_of_a_head))

    def attend(self, heads: slice, part: Block) -> Tensor:
        """The output of these heads and the block's queries: [batch, heads, rows, features]."""
        inputs = self.inputs
        q = self.q[:, heads, part.start : part.end]
        k, v = self.k[:, heads, part.keys], self.v[:, heads, part.keys]
        added = part.view(of_heads(self.bias, heads))[None]  # [1, heads or 1, rows, columns]
        if inputs.index_bias is not None:
            added = added + inputs.index_bias(*part.indices(inputs.scope, q.device))
        if inputs.score_bias is not None:
            of_these = inputs.score_bias.of_heads(heads)
            u, w = of_these.relative(part.queries, part.keys, added.dtype)
            added = plus_content(added, None if u is None else u.flip(2), w, self.room)
        if inputs.segments is not None:
            masked = part.mask(inputs.scope, inputs.segments)
            added = _masked(added, masked, in_place=self.room is not None)
        factor = None if self.weight is None else part.view(self.weight[heads])
        return _attend(q.flip(2), k, v, added, factor).flip(2)


def _masked(added: Tensor, masked: Tensor, *, in_place: bool) -> Tensor:
    """Minus infinity where `masked` is true."""
    if in_place:
        return added.masked_fill_(masked, -math.inf)
    return added.masked_fill(masked, -math.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor, factor: Tensor | None) -> Tensor:
    """One block: softmax(factor · q·k/√head_dim + added) v, [batch, heads, rows, features of v]."""
    if factor is not None:  # a factor is not additive, so no fused kernel computes it
        wide = added.dtype
        products = q.to(wide) @ k.to(wide).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = products * factor + added
        out = scores.softmax(dim=-1) @ v.to(wide)
        return out.to(q.dtype)
    if q.device.type == "cpu":
        # torch's fused kernel takes values as wide as keys alone.
        features, wider = v.shape[-1], q.shape[-1] - v.shape[-1]
        values = F.pad(v, (0, wider)) if wider else v
        return F.scaled_dot_product_attention(q, k, values, attn_mask=added)[..., :features]
    # CUDA's kernels need aligned rows in q's dtype. Copy first: then gradients add up in float32.
    with sdpa_kernel(KERNELS_WITH_MASK):
        aligned = added.contiguous().to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned)


class Blocked(torch.autograd.Function):
    """`in_blocks`, without index_bias; its gradients take memory in proportion to length."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, bias, weight, segments, u, w, ctx.scope, pairs = inputs
        score_bias = None if w is None else ScoreBias(u, w)
        given = Inputs(q, k, v, bias, weight, segments, ctx.scope, score_bias=score_bias)
        ctx.firsts = given.first_keys()
        if pairs is not None:
            pairs.add(ctx.scope, q.shape[1], ctx.firsts)
        out = in_blocks(given, ctx.firsts)
        ctx.save_for_backward(q, k, v, bias, weight, segments, u, w, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, segments, u, w, out = ctx.saved_tensors
        score_bias = None if w is None else ScoreBias(u, w)
        given = Inputs(q, k, v, bias, weight, segments, ctx.scope, score_bias=score_bias)
        wanted = ctx.needs_input_grad[3:5]
        dq, dk, dv, dbias, dweight, du, dw = gradients(given, out, dout, ctx.firsts, wanted)
        return dq, dk, dv, dbias, dweight, None, du, dw, None, None
