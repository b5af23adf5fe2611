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
from megatron.attention.scope import Block

LARGE_BLOCK = 1024
"""Queries of a block for which torch's kernel is fastest."""


def attend_by_content(inputs: Inputs, firsts: FirstKeys | None) -> Tensor:
    """See megatron.attention.attention. `inputs.content_alone` must hold, autograd be off."""
    blocks = _Blocks.of(inputs)
    batch, heads, queries, _ = inputs.q.shape
    out = inputs.v.new_empty(batch, heads, queries, inputs.v.shape[-1])
    for block in inputs.scope.blocks(inputs.exact_rows(LARGE_BLOCK)):
        for group, part in groups_of_heads(block, heads, firsts):
            out[:, group, block.queries] = blocks.attend(group, part)
    return out


class _Attended(NamedTuple):
    """Attention to some keys: the output, and the logarithm of its sum of exponentials.

    out [batch, heads, rows, features]; log_sum [batch, heads, rows]
    """

    out: Tensor
    log_sum: Tensor


class _Blocks(NamedTuple):
    """Keys with room for a feature for each number of w, or as they are; values as wide."""

    inputs: Inputs
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> "_Blocks":
        assert inputs.score_bias is not None
        k, v = inputs.k, inputs.v
        if inputs.score_bias.u is not None:
            k = F.pad(k, (0, inputs.score_bias.u.shape[-1]))
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        return cls(inputs, k.contiguous(), v.contiguous())

    def attend(self, heads: slice, part: Block) -> Tensor:
        """The output of these heads and the block's queries: [batch, heads, rows, features]."""
        assert self.inputs.score_bias is not None
        q = self.inputs.q[:, heads, part.queries]
        wide = torch.promote_types(q.dtype, torch.float32)
        of_these = self.inputs.score_bias.of_heads(heads)
        u, w = of_these.relative(part.queries, part.keys, wide)
        added = None
        if u is None:
            added = w.sum(-1)[:, :, None].expand(-1, -1, part.rows, -1)
        else:
            # The kernel divides all features by √head_dim.
            q = torch.cat([q, u * math.sqrt(q.shape[-1])], dim=-1)
            self.k[:, heads, part.keys, -w.shape[-1] :] = w
        before = part.columns - part.rows
        near = self._attended(q, heads, part, slice(before, part.columns), added, causal=True)
        out = near.out
        if before > 0:
            far = self._attended(q, heads, part, slice(0, before), added)
            out = _merged(near, far)
        features = self.inputs.v.shape[-1]
        return out[..., :features].to(q.dtype)

    def _attended(
        self,
        q: Tensor,
        heads: slice,
        part: Block,
        columns: slice,
        added: Tensor | None,
        causal: bool = False,
    ) -> _Attended:
        """Attention of a block's queries to some columns of it."""
        keys = slice(part.first_key + columns.start, part.first_key + columns.stop)
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q,
            self.k[:, heads, keys],
            self.v[:, heads, keys],
            is_causal=causal,
            attn_mask=None if added is None else added[..., columns],
            scale=1 / math.sqrt(self.inputs.q.shape[-1]),
        )
        return _Attended(*result)


def _merged(near: _Attended, far: _Attended) -> Tensor:
    """The output of attention to the keys of both: [batch, heads, rows, features]."""
    share_of_far = (far.log_sum - near.log_sum).sigmoid()[..., None]
    wide = share_of_far.dtype
    return torch.lerp(near.out.to(wide), far.out.to(wide), share_of_far)
