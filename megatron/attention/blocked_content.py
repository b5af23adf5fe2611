"""Causal attention whose only bias is by content, on the CPU: no mask is ever filled.

The keys before a block are visible to all of its queries, and its own keys are under torch's causal
mask. So both parts go to torch's kernel as they are, and their outputs are merged. A number for
each key alone is one row, which all queries of a block read. A product u·w is one more feature of
queries and keys.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.first_keys import FirstKeys, groups_of_heads
from megatron.attention.inputs import Inputs
from megatron.attention.scope import BLOCK, Block

LARGE_BLOCK = 1024
"""Queries of a block for which torch's kernel is fastest."""
EXACT_RANGE = 128
"""Where u·w differs by more within a large block, float32 would lose digits."""


def attend_by_content(inputs: Inputs, firsts: FirstKeys | None) -> Tensor:
    """See megatron.attention.attention. `inputs.content_alone` must hold, autograd be off."""
    blocks = _Blocks.of(inputs)
    outputs = []
    for block in inputs.scope.blocks(blocks.rows):
        groups = groups_of_heads(block, inputs.q.shape[1], firsts)
        of_heads = [blocks.attend(heads, part) for heads, part in groups]
        outputs.append(torch.cat(of_heads, dim=1))
    return torch.cat(outputs, dim=2)


class _Attended(NamedTuple):
    """Attention to some keys: the output, and the logarithm of its sum of exponentials.

    out [batch, heads, rows, features]; log_sum [batch, heads, rows]
    """

    out: Tensor
    log_sum: Tensor


class _Blocks(NamedTuple):
    """q and k with room for a feature for each number of u and w, or as they are."""

    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    rows: int

    @classmethod
    def of(cls, inputs: Inputs) -> "_Blocks":
        q, k, v = inputs.q, inputs.k, inputs.v
        assert inputs.score_bias is not None
        u = inputs.score_bias.u
        if u is not None:
            # The kernel divides all features by √head_dim.
            q = torch.cat([q, u.to(q.dtype) * math.sqrt(q.shape[-1])], dim=-1)
            k = F.pad(k, (0, u.shape[-1]))
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return cls(inputs, q, k.contiguous(), v.contiguous(), _rows(inputs))

    def attend(self, heads: slice, part: Block) -> Tensor:
        """The output of these heads and the block's queries: [batch, heads, rows, features]."""
        assert self.inputs.score_bias is not None
        of_these = self.inputs.score_bias.of_heads(heads)
        wide = torch.promote_types(self.q.dtype, torch.float32)
        u, w = of_these.relative(part.queries, part.keys, wide)
        added = None
        if u is None:
            added = w.sum(-1)[:, :, None].expand(-1, -1, part.rows, -1)
        else:
            self.k[:, heads, part.keys, -w.shape[-1] :] = w
        before = part.columns - part.rows
        near = self._attended(heads, part, slice(before, part.columns), added, causal=True)
        out = near.out
        if before > 0:
            far = self._attended(heads, part, slice(0, before), added)
            out = _merged(near, far)
        features = self.inputs.v.shape[-1]
        return out[..., :features].to(self.q.dtype)

    def _attended(
        self, heads: slice, part: Block, columns: slice, added: Tensor | None, causal: bool = False
    ) -> _Attended:
        """Attention of a block's queries to some columns of it."""
        keys = slice(part.first_key + columns.start, part.first_key + columns.stop)
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.q[:, heads, part.queries],
            self.k[:, heads, keys],
            self.v[:, heads, keys],
            is_causal=causal,
            attn_mask=None if added is None else added[..., columns],
            scale=1 / math.sqrt(self.inputs.q.shape[-1]),
        )
        return _Attended(*result)


def _rows(inputs: Inputs) -> int:
    """How many queries a block may have."""
    assert inputs.score_bias is not None
    u, w = inputs.score_bias.u, inputs.score_bias.w
    largest_u = 1.0 if u is None else float(u.abs().max())
    for block in inputs.scope.blocks(LARGE_BLOCK):
        own = w[:, :, inputs.scope.before + block.start : block.end_key]
        spread = float((own.amax(2) - own.amin(2)).max())
        if not spread * largest_u <= EXACT_RANGE:
            return BLOCK
    return LARGE_BLOCK


def _merged(near: _Attended, far: _Attended) -> Tensor:
    """The output of attention to the keys of both: [batch, heads, rows, features]."""
    share_of_far = (far.log_sum - near.log_sum).sigmoid()[..., None]
    wide = share_of_far.dtype
    return torch.lerp(near.out.to(wide), far.out.to(wide), share_of_far)
