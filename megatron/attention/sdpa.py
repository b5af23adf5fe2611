"""Attention through torch's scaled_dot_product_attention, in blocks of queries, so that memory grows with length.

With the keys reversed, bias[h, i - j] is a view of the table whose rows each start one element later (a Hankel
matrix, strides (·, 1, 1)): a block of queries reads its biases in place, and keys that none of it sees are skipped.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention.eager import hidden

BLOCK = 256
# cuDNN's kernel has given NaN gradients under a mask (pytorch#196678).
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
) -> Tensor:
    """See megatron.attention.attention."""
    queries, keys = q.shape[2], k.shape[2]
    window = None if window is not None and window >= keys else window
    chunk = None if chunk is not None and 2 * chunk >= keys else chunk
    narrowed = window is not None or chunk is not None or segments is not None
    if bias is None and weight is None and index_bias is None and not narrowed:
        if queries == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if queries == 1:
            return F.scaled_dot_product_attention(q, k, v)
    if bias is None:
        bias = torch.zeros(q.shape[1], keys, device=q.device)
    reversed_bias = _reversed(bias, keys, -math.inf)
    reversed_weight = None if weight is None else _reversed(weight, keys, 0.0)
    k, v = k.flip(2), v.flip(2)
    outputs = []
    for start, end, first, last in _blocks(queries, keys, window, chunk):
        rows = slice(keys - last, keys - first)  # keys first … last - 1, in reversed order
        mask = _view(reversed_bias, start, end, keys - queries, rows)[None]  # [1, heads, end - start, last - first]
        scale = None if reversed_weight is None else _view(reversed_weight, start, end, keys - queries, rows)
        query = keys - queries + torch.arange(start, end, device=q.device)
        key = torch.arange(last - 1, first - 1, -1, device=q.device)
        if index_bias is not None:
            mask = mask + index_bias(query, key)
        if narrowed:
            mask = mask.masked_fill(hidden(query, key, window, chunk, segments), -math.inf)
        outputs.append(_attend(q[:, :, start:end], k[:, :, rows], v[:, :, rows], mask, scale))
    return torch.cat(outputs, dim=2)


def _blocks(queries: int, keys: int, window: int | None, chunk: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(first query, last + 1, first key, last + 1): the keys that some query of the block sees."""
    before = keys - queries
    for start in range(0, queries, BLOCK):
        end = min(start + BLOCK, queries)
        first = 0 if window is None else max(0, before + start - window + 1)
        if chunk is not None:
            first = max(first, ((before + start) // chunk - 1) * chunk)
        yield start, end, first, before + end


def _reversed(table: Tensor, keys: int, beyond: float) -> Tensor:
    """[heads, >= keys] -> [heads, 2 keys - 1]: `beyond` for keys after the query, then distances 0, 1, …"""
    return F.pad(table[:, :keys], (keys - 1, 0), value=beyond)


def _view(table: Tensor, start: int, end: int, before: int, rows: slice) -> Tensor:
    """A block's values without a copy: [heads, end - start, len(rows)]; `before` keys precede the first query."""
    # Query i and reversed key j' are before + i + j' - (keys - 1) apart; distance 0 stands at keys - 1 in the table.
    offset = table.storage_offset() + before + start + rows.start
    shape = (table.shape[0], end - start, rows.stop - rows.start)
    return table.as_strided(shape, (table.stride(0), 1, 1), offset)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor | None) -> Tensor:
    """One block: [batch, heads, queries, head_dim]."""
    if scale is not None:  # not additive, so no fused kernel knows it
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(q.shape[-1]) * scale + mask
        return (scores.softmax(dim=-1) @ v.to(dtype)).to(q.dtype)
    if q.device.type != "cpu":
        # CUDA kernels want rows that are aligned and of q's dtype; copied first, so that gradients add up in float32.
        mask = mask.contiguous().to(q.dtype)
        with sdpa_kernel(MASKED):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if mask.dtype == torch.float32 and q.dtype == torch.float64:
        mask = mask.double()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
