"""Attention through torch's scaled_dot_product_attention, with a bias in blocks of queries.

Blocks read the distance table in place, so no bias is copied. Keys that no query of the block
attends to are skipped (`scope`), as are those that would get nothing (`first_keys`). Nothing of
size queries · keys ever exists: gradients are recomputed block by block (`blocked_gradients`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention.blocked_gradients import gradients
from megatron.attention.eager import ScoreBias
from megatron.attention.first_keys import FirstKeys, Pairs, first_keys, groups_of_heads
from megatron.attention.scope import BLOCK, Block, Inputs, Scope, of_heads

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
    return Blocked.apply(q, k, v, bias, weight, segments, u, w, scope, pairs)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """torch's kernel. On the CPU it takes values as wide as keys alone, and others without it."""
    features, wider = v.shape[-1], k.shape[-1] - v.shape[-1]
    if wider == 0 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    padded = F.pad(v, (0, wider))
    return F.scaled_dot_product_attention(q, k, padded, is_causal=is_causal)[..., :features]


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
            fill = added.masked_fill if self.room is None else added.masked_fill_
            added = fill(masked, -math.inf)
        factor = None if self.weight is None else part.view(self.weight[heads])
        return _attend(q.flip(2), k, v, added, factor).flip(2)


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
        ctx.firsts = first_keys(given)
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


def attend_by_content(inputs: Inputs, firsts: FirstKeys | None) -> Tensor:
    """Causal attention whose only bias is by content, on the CPU: no mask is ever filled.

    The keys before a block are visible to all of its queries, and its own keys are under torch's
    causal mask. So both parts go to torch's kernel as they are, and their outputs are merged. A
    number for each key alone is one row, which all queries of a block read. A product u·w is one
    more feature of queries and keys. `inputs.content_alone` must hold, autograd be off.
    """
    assert inputs.score_bias is not None
    batch, heads, queries, head_dim = inputs.q.shape
    features = inputs.v.shape[-1]
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    k = inputs.k
    if inputs.score_bias.u is not None:
        k = F.pad(k, (0, inputs.score_bias.u.shape[-1]))
    v = F.pad(inputs.v, (0, k.shape[-1] - features)).contiguous()
    k = k.contiguous()
    out = inputs.v.new_empty(batch, heads, queries, features)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    scale = 1 / math.sqrt(head_dim)

    for block in inputs.scope.blocks(inputs.exact_rows(LARGE_BLOCK)):
        for group, part in groups_of_heads(block, heads, firsts):
            q = inputs.q[:, group, part.queries]
            of_these = inputs.score_bias.of_heads(group)
            u, w = of_these.relative(part.queries, part.keys, wide)
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


def plus_content(added: Tensor, u: Tensor | None, w: Tensor, room: Tensor | None = None) -> Tensor:
    """added + u·w: [batch, heads, queries, keys], in one pass where the rank is one.

    added [batch or 1, heads, queries, keys];
    room: numbers to be overwritten by the result, which then has no gradient. Memory that the
    system gives anew for each block takes nine times as long to fill.
    """
    out = None
    if room is not None:
        shape = (*w.shape[:2], *added.shape[2:])
        out = room[: math.prod(shape)].view(shape)
    if u is None:
        return torch.add(added, w.sum(-1)[:, :, None], out=out)
    if u.shape[-1] == 1:
        return torch.addcmul(added, u, w.mT, out=out)
    return torch.add(added, u @ w.mT, out=out)
