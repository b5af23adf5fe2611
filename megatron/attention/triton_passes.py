"""The forward and the backward pass of our Triton programs: their launches, tables and bounds.

Gradients are deterministic: no atomics, and tile sizes depend on the GPU and on what a call looks
like, not on its numbers.
"""

# A program is launched with more than its Python signature says.
# pyright: reportCallIssue=false, reportArgumentType=false

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.eager import ScoreBias
from megatron.attention.first_keys import GRAIN, first_of_grains
from megatron.attention.scope import Scope

MOST_SUMS = 64 * 2**20
"""float32 numbers (256 MiB) in which the tables' gradients are summed at once.

More only where one pair of batch and head needs more: from about 46,000 tokens on.
"""
FEWEST_KEYS = 8192
"""With fewer, some twenty small launches would cost more than a few percent of the forward pass, by
estimate: the products of 12 heads at 8192 tokens take an H100 a millisecond or two."""


class Tiles(NamedTuple):
    """Queries and keys of a program's tile, its warps, and its stages of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


OTHERS = 80
"""GPUs without tiles of their own take those of this compute capability."""
TILES = """
80 forward                   2 64  128x64/8/2   128x64/8/2   128x64/8/2
80 forward                   2 128 128x64/8/2   128x64/8/2   128x32/8/2
80 forward                   4 64  64x32/8/2    64x32/8/2    64x32/8/2
80 forward                   4 128 64x32/8/2    64x32/8/2    64x32/8/2
80 query_gradient            2 64  64x64/4/2    64x32/4/2    64x32/4/2
80 query_gradient            2 128 128x32/8/2   64x32/8/2    64x32/8/2
80 query_gradient            4 64  64x32/8/2    64x32/8/2    64x32/8/2
80 query_gradient            4 128 16x32/4/2    16x32/4/2    16x32/4/2
80 query_and_table_gradients 2 64  64x64/8/2    32x32/4/2    32x32/4/2
80 query_and_table_gradients 2 128 64x64/8/2    64x64/8/2    32x32/4/2
80 query_and_table_gradients 4 64  32x32/8/2    32x32/8/2    32x32/8/2
80 query_and_table_gradients 4 128 32x32/8/2    32x32/8/2    32x32/8/2
80 key_gradients             2 64  64x64/4/2    32x64/4/2    32x64/8/2
80 key_gradients             2 128 64x64/8/2    64x64/8/2    64x64/8/2
80 key_gradients             4 64  32x32/8/1    32x32/8/1    32x32/8/1
80 key_gradients             4 128 32x32/8/1    32x32/8/1    32x32/8/1
90 forward                   2 64  128x64/8/2   128x64/8/2   128x64/8/2
90 forward                   2 128 128x64/8/2   128x64/8/2   128x32/8/2
90 forward                   4 64  64x32/8/2    64x32/8/2    64x32/8/2
90 forward                   4 128 32x32/8/2    32x32/8/2    32x32/8/2
90 query_gradient            2 64  64x64/4/2    64x64/4/2    64x64/8/2
90 query_gradient            2 128 128x32/8/2   128x32/8/2   128x32/8/2
90 query_gradient            4 64  32x32/8/2    32x32/8/2    32x32/8/2
90 query_gradient            4 128 16x32/4/2    16x32/4/2    16x32/4/2
90 query_and_table_gradients 2 64  64x64/4/2    64x64/8/2    32x32/2/2
90 query_and_table_gradients 2 128 32x32/4/2    32x32/4/2    32x32/4/2
90 query_and_table_gradients 4 64  32x32/4/2    32x32/8/2    16x16/4/2
90 query_and_table_gradients 4 128 32x32/8/2    16x16/4/2    16x16/4/2
90 key_gradients             2 64  64x64/4/2    64x64/4/2    64x64/8/2
90 key_gradients             2 128 64x64/8/2    32x64/8/2    32x64/8/2
90 key_gradients             4 64  32x32/8/1    32x32/8/1    32x32/8/1
90 key_gradients             4 128 32x16/8/1    32x16/8/1    32x16/8/1
"""
"""A line for each compute capability (80 is an A100, 90 an H100 or H200), program, bytes of a
number, and most columns: tiles as queries x keys / warps / stages. First those with nothing beside
a bias, then with chunks or documents, then with a weight or a bias by content."""


class PaddedTables(NamedTuple):
    """Both tables from distance 0 on, views of [heads, PAD + keys + PAD] float32.

    The bias is in base 2, with -inf where masked.
    """

    bias: Tensor
    weight: Tensor | None


class Gradients(NamedTuple):
    """Of all inputs: those of tables [heads, keys] float32, of u and w in float32 as they are.

    None where there is no such input, or where those of the tables are not wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None
    u: Tensor | None
    w: Tensor | None


class Content(NamedTuple):
    """A bias by content u·w of rank one, contiguous float32.

    u [batch, heads, queries] or None for ones; w [batch, heads, keys], and what w's float64 has
    beyond it, or None where it has nothing.
    """

    u: Tensor | None
    w: Tensor
    w_low: Tensor | None


def two_floats(u: Tensor | None, w: Tensor) -> Content:
    """u and w as the programs read them.

    A float64 w becomes two float32 numbers, which hold 48 of its 53 digits.
    """
    u = None if u is None else u.float().contiguous()
    high = w.float().contiguous()
    if w.dtype != torch.float64:
        return Content(u, high, None)
    low = (w - high.double()).float().contiguous()
    return Content(u, high, low)


def reach_of(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
) -> Tensor | None:
    """Which keys get some weight, as `first_of_grains` says; None where asking is not worth it.

    u [batch, heads, queries], w [batch, heads, keys]; the GPU is not waited for.
    """
    scope = Scope(q.shape[2], k.shape[2], None, None)
    without_bound = weight is not None or (bias is None and w is None)
    if without_bound or scope.keys < FEWEST_KEYS or scope.queries < GRAIN:
        return None
    score_bias = None if w is None else ScoreBias.of((u, w))
    return first_of_grains(q, k, bias, score_bias, scope)


def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: PaddedTables,
    segments: Tensor | None,
    window: int,
    chunk: int,
    content: Content | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output in q's shape, and lse [batch, heads, queries] float32, which `forward` describes.

    reach: from `first_of_grains`, or None where all keys count
    """
    from megatron.attention.triton_programs import forward

    q, k, v = aligned(q), aligned(k), aligned(v)
    batch, heads, queries, _ = q.shape
    out = empty_by_length(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    flags = _flags(q, k, tables.weight, chunk, segments, content, reach)
    tiles = tiles_for("forward", q, flags)
    bounds = _first_keys(segments, reach, q, tiles)
    grid = (_blocks(queries, tiles.queries), batch * heads)
    with torch.cuda.device_of(q):
        forward[grid](
            *(q, k, v, *_pointers(tables)),
            *(_pointer(segments, lse), *_of_content(content, lse), _pointer(bounds, lse)),
            *(out, lse),
            *_strides(q, k, v),
            *_sizes(q, k, tables.bias, window, chunk),
            **flags,
            **_launch(tiles),
        )
    return out, lse


def backward_pass(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: PaddedTables,
    segments: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int,
    chunk: int,
    content: Content | None = None,
    reach: Tensor | None = None,
    *,
    wants_tables: bool,
) -> Gradients:
    """The gradients of all inputs from that of the output."""
    from megatron.attention.triton_programs import key_gradients

    dout, q, k, v = aligned(dout), aligned(q), aligned(k), aligned(v)
    batch, heads = q.shape[:2]
    keys = k.shape[2]
    dq, dk, dv = empty_by_length(q), empty_by_length(k), empty_by_length(v)
    delta = torch.empty_like(lse)
    du = dw = None
    if content is not None:
        du = None if content.u is None else torch.empty_like(content.u)
        dw = torch.empty_like(content.w)
    inputs = (q, k, v, *_pointers(tables), _pointer(segments, lse), *_of_content(content, lse))
    strides = _strides(q, k, v, dout)
    sizes = _sizes(q, k, tables.bias, window, chunk)
    flags = _flags(q, k, tables.weight, chunk, segments, content, reach)
    with torch.cuda.device_of(q):
        name = "query_and_table_gradients" if wants_tables else "query_gradient"
        wanted_tables = 0
        if wants_tables:
            wanted_tables = 1 if tables.weight is None else 2
        tiles = tiles_for(name, q, flags)
        bounds = _pointer(_first_keys(segments, reach, q, tiles), lse)
        table_gradients = _query_gradient(
            *(*inputs, bounds, out, lse, dout, delta, dq, _pointer(du, lse)),
            numbers=(*strides, *sizes),
            distances=min(keys, window, 2 * chunk),
            tables=wanted_tables,
            tiles=tiles,
            flags=flags,
        )
        tiles = tiles_for("key_gradients", q, flags)
        bounds = _pointer(_last_queries(segments, reach, q, k, tiles), lse)
        key_gradients[(_blocks(keys, tiles.keys), batch * heads)](
            *(*inputs, bounds, lse, dout, delta, dk, dv, _pointer(dw, lse)),
            *strides,
            *sizes,
            **flags,
            **_launch(tiles),
        )
    if not wants_tables:
        return Gradients(dq, dk, dv, None, None, du, dw)
    masked = keys - table_gradients.shape[2]  # distances beyond the window or two chunks
    padded = F.pad(table_gradients, (0, masked))
    dbias = padded[0]
    dweight = padded[1] if tables.weight is not None else None
    return Gradients(dq, dk, dv, dbias, dweight, du, dw)


def as_table(gradient: Tensor | None, table: Tensor) -> Tensor:
    """[heads, keys] float32 -> the shape and dtype of a table [heads, >= keys]."""
    assert gradient is not None
    longer = table.shape[1] - gradient.shape[1]
    return F.pad(gradient, (0, longer)).to(table.dtype)


def _query_gradient(
    q: Tensor,
    *others: Tensor,
    numbers: tuple[Any, ...],
    distances: int,
    tables: int,
    tiles: Tiles,
    flags: dict[str, Any],
) -> Tensor:
    """Launch the program: dq and delta, and the gradients of `tables` tables.

    These are returned, [tables, heads, distances] float32. Every block of queries writes sums of
    its own, which are added in a fixed order. So that they do not exceed MOST_SUMS, pairs of batch
    and head are launched in pieces.
    """
    from megatron.attention.triton_programs import query_gradient

    batch, heads, queries, _ = q.shape
    pairs = batch * heads
    blocks = _blocks(queries, tiles.queries)
    written = distances + tiles.keys  # whole tiles, of which the last may pass the end
    options = {**flags, **_launch(tiles), "TABLES": tables > 0}
    if tables == 0:
        unused = (q, q)
        query_gradient[(blocks, pairs)](q, *others, *unused, *numbers, 0, written, **options)
        return q.new_empty((0, heads, distances), dtype=torch.float32)
    piece = max(1, min(pairs, MOST_SUMS // (tables * blocks * written)))
    totals = q.new_empty((tables, pairs, written), dtype=torch.float32)
    for first in range(0, pairs, piece):
        count = min(piece, pairs - first)
        sums = q.new_zeros((tables, count, blocks, written), dtype=torch.float32)
        pointers = (sums[0], sums[-1])
        query_gradient[(blocks, count)](q, *others, *pointers, *numbers, first, written, **options)
        totals[:, first : first + count] = sums.sum(2)
    return totals.unflatten(1, (batch, heads)).sum(1)[:, :, :distances]


def padded_tables(
    k: Tensor, bias: Tensor | None, weight: Tensor | None, window: int
) -> PaddedTables:
    """The tables of `bias` and `weight` [heads, >= keys] for the keys k, masked by the window."""
    from megatron.attention.triton_programs import PAD

    heads, keys = k.shape[1:3]
    padded_bias = torch.full((heads, keys + 2 * PAD), -math.inf, device=k.device)
    inside = slice(PAD, PAD + window)
    if bias is None:
        padded_bias[:, inside] = 0.0
    else:
        padded_bias[:, inside] = bias[:, :window].float() * math.log2(math.e)
    if weight is None:
        return PaddedTables(padded_bias[:, PAD:], None)
    padded_weight = F.pad(weight[:, :keys].float(), (PAD, PAD))
    return PaddedTables(padded_bias[:, PAD:], padded_weight[:, PAD:])


def _pointers(tables: PaddedTables) -> tuple[Tensor, Tensor]:
    """Both tables; an absent weight is not read."""
    return tables.bias, _pointer(tables.weight, tables.bias)


def _of_content(content: Content | None, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, w and w_low, or another tensor where the programs do not read one."""
    if content is None:
        return other, other, other
    return _pointer(content.u, other), content.w, _pointer(content.w_low, other)


def _first_keys(
    segments: Tensor | None, reach: Tensor | None, q: Tensor, tiles: Tiles
) -> Tensor | None:
    """For every block of queries, the first key that counts: [batch, heads, blocks] int32.

    It is that of the block's documents, and the first that gets some weight, rounded down.
    """
    if segments is None and reach is None:
        return None
    batch, heads, queries, _ = q.shape
    blocks = _blocks(queries, tiles.queries)
    first = torch.zeros(batch, heads, blocks, dtype=torch.int64, device=q.device)
    if segments is not None:
        overlap = _documents_overlap(segments, queries, tiles)
        first_block = overlap.byte().argmax(2)
        first = torch.maximum(first, (first_block * tiles.keys)[:, None])
    if reach is not None:
        # A block of queries lies in one grain: its size divides GRAIN.
        grain = torch.arange(blocks, device=q.device) * tiles.queries // GRAIN
        whole_grains = reach // GRAIN * GRAIN
        first = torch.maximum(first, whole_grains[grain].mT)
    return first.to(torch.int32)


def _last_queries(
    segments: Tensor | None, reach: Tensor | None, q: Tensor, k: Tensor, tiles: Tiles
) -> Tensor | None:
    """For every block of keys, the end of the queries that it counts for: as `_first_keys`."""
    if segments is None and reach is None:
        return None
    batch, heads, queries, _ = q.shape
    blocks = _blocks(k.shape[2], tiles.keys)
    end = torch.full((batch, heads, blocks), queries, dtype=torch.int64, device=q.device)
    if segments is not None:
        overlap = _documents_overlap(segments, queries, tiles)
        blocks_after = overlap.byte().flip(1).argmax(1)
        end_block = overlap.shape[1] - blocks_after
        end = torch.minimum(end, (end_block * tiles.queries)[:, None])
    if reach is not None:
        end_key = (torch.arange(blocks, device=q.device) + 1) * tiles.keys
        sees = reach.mT[:, :, None] < end_key  # [heads, grains, blocks]
        grain = torch.arange(1, reach.shape[0] + 1, device=q.device)
        end_grain = (sees * grain[:, None]).amax(1)
        end = torch.minimum(end, end_grain * GRAIN)
    return end.to(torch.int32)


def _documents_overlap(segments: Tensor, queries: int, tiles: Tiles) -> Tensor:
    """Whether the ranges of documents in two blocks overlap: [batch, query blocks, key blocks]."""
    keys = segments.shape[1]
    first_document, last_document = _document_ranges(segments, keys - queries, tiles.queries)
    first_of_keys, last_of_keys = _document_ranges(segments, 0, tiles.keys)
    starts_before_end = first_document[:, :, None] <= last_of_keys[:, None]
    ends_after_start = first_of_keys[:, None] <= last_document[:, :, None]
    return starts_before_end & ends_after_start


def _document_ranges(segments: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest document of every block of tokens from `first` on: [batch, blocks]."""
    keys = segments.shape[1]
    count = _blocks(keys - first, size) * size
    index = first + torch.arange(count, device=segments.device)
    in_blocks = segments[:, index.clamp(max=keys - 1)].unflatten(1, (-1, size))
    return in_blocks.aminmax(dim=2)


def _blocks(length: int, size: int) -> int:
    """How many blocks of `size` cover a length."""
    return -(-length // size)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows begin at multiples of 16 numbers: [..., head_dim] -> same.

    Triton knows no other alignment than 16 of a stride. Without it every number is a load of its
    own, as for heads of 40 side by side.
    """
    if x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1]):
        return x
    head_dim = x.shape[-1]
    padded = x.new_empty(*x.shape[:-1], math.ceil(head_dim / 16) * 16)
    return padded[..., :head_dim].copy_(x)


def empty_by_length(x: Tensor) -> Tensor:
    """Empty [batch, heads, length, head_dim], laid out as [batch, length, heads, head_dim]."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _pointer(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another one that the program does not read."""
    return other if tensor is None else tensor


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _sizes(q: Tensor, k: Tensor, table: Tensor, window: int, chunk: int) -> tuple[Any, ...]:
    scale = math.log2(math.e) / math.sqrt(q.shape[3])
    return table.stride(0), q.shape[1], q.shape[2], k.shape[2], window, chunk, scale


def _flags(
    q: Tensor,
    k: Tensor,
    weight: Tensor | None,
    chunk: int,
    segments: Tensor | None,
    content: Content | None,
    reach: Tensor | None,
) -> dict[str, Any]:
    ieee = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    on_nvidia = q.device.type == "cuda" and torch.version.cuda is not None
    numbers_of_w = 0
    if content is not None:
        numbers_of_w = 1 if content.w_low is None else 2
    return {
        "HEAD_DIM": q.shape[3],
        "COLUMNS": columns(q.shape[3]),
        "WEIGHT": weight is not None,
        "CHUNK": chunk < k.shape[2],
        "SEGMENTS": segments is not None,
        "BOUNDS": segments is not None or reach is not None,
        "DIRECT": on_nvidia,
        "PRECISION": "ieee" if ieee else "tf32",
        "CONTENT": numbers_of_w,
        "ONES": content is not None and content.u is None,
    }


def _launch(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@cache
def all_tiles() -> dict[tuple[int, str, int, int], list[Tiles]]:
    """TILES by compute capability, program, bytes and columns."""
    found = {}
    for line in TILES.strip().splitlines():
        capability, program, itemsize, most, *cells = line.split()
        tiles = [Tiles(*map(int, re.split("[x/]", cell))) for cell in cells]
        found[int(capability), program, int(itemsize), int(most)] = tiles
    return found


def tiles_for(program: str, q: Tensor, flags: Mapping[str, Any]) -> Tiles:
    """The tiles of a program for queries [batch, heads, queries, head_dim] and its flags."""
    capability = OTHERS  # for the interpreter's CPU too
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    if (capability, program, 2, 64) not in all_tiles():
        capability = OTHERS
    most = 64 if columns(q.shape[3]) <= 64 else 128
    bias, masked, weighted = all_tiles()[capability, program, q.element_size(), most]
    if flags["WEIGHT"] or flags["CONTENT"]:
        return weighted
    return masked if flags["CHUNK"] or flags["SEGMENTS"] else bias


def columns(head_dim: int) -> int:
    """head_dim as a tile holds it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
