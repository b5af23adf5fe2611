"""The forward and the backward pass of our Triton programs: their launches, tables and bounds.

Gradients are deterministic: no atomics, and tile sizes depend on the GPU and on what a call looks
like, not on its numbers.
"""

# A program is launched with more than its Python signature says.
# pyright: reportCallIssue=false, reportArgumentType=false

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_SUMS = 64 * 2**20
"""float32 numbers (256 MiB) in which the tables' gradients are summed at once.

More only where one pair of batch and head needs more: from about 46,000 tokens on.
"""


class Tiles(NamedTuple):
    """Queries and keys of a program's tile, its warps, and its stages of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        """As arguments of a program."""
        sizes = {"BLOCK_Q": self.queries, "BLOCK_K": self.keys}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


DEFAULT_CAPABILITY = 80
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
a bias, then with documents, then with a weight or a bias by content."""


class Call:
    """The arguments that all programs of an attention share: see megatron.attention.attention.

    inputs: q, k, v, bias, weight, segments, u and w;
    bias, weight [heads, >= keys]; segments [batch, keys] int; window: at most the keys;
    u [batch, heads, queries], w [batch, heads, keys]
    """

    def __init__(self, inputs: Sequence[Any], window: int) -> None:
        from megatron.attention.triton_programs import PAD

        q, k, v, bias, weight, segments, u, w = inputs
        heads, keys = k.shape[1:3]
        self.q, self.k, self.v = aligned(q), aligned(k), aligned(v)
        self.begins = self.ends = None
        if segments is not None:
            self.begins, self.ends = document_bounds(segments.contiguous())
        # Both tables from distance 0 on; the bias is in base 2, with -inf where masked.
        table = torch.full((heads, keys + 2 * PAD), -math.inf, device=k.device)
        inside = slice(PAD, PAD + window)
        if bias is None:
            table[:, inside] = 0.0
        else:
            table[:, inside] = bias[:, :window].float() * math.log2(math.e)
        self.bias = table[:, PAD:]
        self.weight = None
        if weight is not None:
            self.weight = F.pad(weight[:, :keys].float(), (PAD, PAD))[:, PAD:]
        self.u = None if u is None else u.float().contiguous()
        self.w = None
        if w is not None:  # two float32 numbers, which hold 48 of float64's 53 digits
            high = w.float()
            low = (w.double() - high.double()).float()
            self.w = torch.stack([high, low], dim=2)

        ieee = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        self.flags = {
            "HEAD_DIM": q.shape[3],
            "COLUMNS": columns(q.shape[3]),
            "WEIGHT": weight is not None,
            "SEGMENTS": segments is not None,
            "DIRECT": q.device.type == "cuda" and torch.version.cuda is not None,
            "PRECISION": "ieee" if ieee else "tf32",
            "CONTENT": w is not None,
            "ONES": w is not None and u is None,
        }
        scale = math.log2(math.e) / math.sqrt(q.shape[3])
        self.sizes = (self.bias.stride(0), heads, q.shape[2], keys, window, scale)

    def pointers(self, *tensors: Tensor | None) -> list[Tensor]:
        """Tensors for a program, which reads none that is absent."""
        return [self.bias if tensor is None else tensor for tensor in tensors]

    @property
    def inputs(self) -> list[Tensor]:
        """The arguments that every program reads first."""
        content = (self.u, self.w)
        tables = (self.bias, self.weight)
        return self.pointers(self.q, self.k, self.v, *tables, self.begins, *content)

    def strides(self, *more: Tensor) -> list[int]:
        """Of q, k, v and more tensors, but for the last dimension."""
        return [stride for x in (self.q, self.k, self.v, *more) for stride in x.stride()[:3]]


def forward_pass(call: Call) -> tuple[Tensor, Tensor]:
    """Output in q's shape, and lse [batch, heads, queries] float32, which `forward` describes."""
    from megatron.attention.triton_programs import forward

    q = call.q
    out = empty_by_length(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    tiles = tiles_for("forward", q, call.flags)
    grid = (blocks_of(q.shape[2], tiles.queries), q.shape[0] * q.shape[1])
    written = (out, lse)
    with torch.cuda.device_of(q):
        forward[grid](
            *call.inputs, *written, *call.strides(), *call.sizes, **call.flags, **tiles.launch
        )
    return out, lse


def backward_pass(
    dout: Tensor, dlse: Tensor, call: Call, out: Tensor, lse: Tensor, *, wants_tables: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, weight, u and w: those of tables and content in float32.

    None for what does not exist, and for tables if they are not wanted, whose gradients are
    [heads, distances]. dlse [batch, heads, queries]: of the lse to the base e
    """
    from megatron.attention.triton_programs import key_gradients

    dout, dlse = aligned(dout), dlse.float().contiguous()
    dq, dk, dv = empty_by_length(call.q), empty_by_length(call.k), empty_by_length(call.v)
    delta = torch.empty_like(lse)
    du = None if call.u is None else torch.empty_like(call.u)
    dw = None if call.w is None else call.w.new_empty(call.k.shape[:3])
    tables = 0
    if wants_tables:
        tables = 1 if call.weight is None else 2
    with torch.cuda.device_of(dout):
        written = (out, lse, dout, dlse, delta, dq, du)
        table_gradients = _query_gradient(call, written, call.strides(dout), tables)
        tiles = tiles_for("key_gradients", call.q, call.flags)
        pairs = dout.shape[0] * dout.shape[1]
        key_gradients[(blocks_of(call.k.shape[2], tiles.keys), pairs)](
            *call.inputs,
            *call.pointers(call.ends, lse, dout, delta, dk, dv, dw),
            *call.strides(dout),
            *call.sizes,
            **call.flags,
            **tiles.launch,
        )
    if dw is not None:  # w of a query's own key is subtracted from all its scores
        dw[:, :, dw.shape[2] - dlse.shape[2] :] -= dlse if call.u is None else dlse * call.u
    dbias = table_gradients[0] if tables > 0 else None
    dweight = table_gradients[1] if tables > 1 else None
    return dq, dk, dv, dbias, dweight, du, dw


def _query_gradient(
    call: Call, tensors: tuple[Tensor | None, ...], strides: list[int], tables: int
) -> Tensor:
    """Launch the program: delta, dq and du, which tensors end with, and the gradients of tables.

    These are returned, [tables, heads, distances] float32. Every block of queries writes sums of
    its own, which are added in a fixed order. So that they do not exceed MOST_SUMS, pairs of batch
    and head are launched in pieces.
    """
    from megatron.attention.triton_programs import query_gradient

    batch, heads, queries, _ = call.q.shape
    pairs = batch * heads
    distances = call.sizes[4]  # of the window
    program = "query_and_table_gradients" if tables else "query_gradient"
    tiles = tiles_for(program, call.q, call.flags)
    blocks = blocks_of(queries, tiles.queries)
    written = distances + tiles.keys  # whole tiles, of which the last may pass the end
    pieces = pairs
    if tables:
        pieces = max(1, min(pairs, MOST_SUMS // (tables * blocks * written)))
    pointers = [*call.inputs, *call.pointers(*tensors)]
    totals = call.bias.new_empty((tables, pairs, written))
    for first in range(0, pairs, pieces):
        count = min(pieces, pairs - first)
        sums = call.bias.new_zeros((tables, count, blocks, written))
        table_sums = (sums[0], sums[-1]) if tables else (call.bias, call.bias)
        query_gradient[(blocks, count)](
            *(*pointers, *table_sums, *strides, *call.sizes, first, written),
            TABLES=tables > 0,
            **call.flags,
            **tiles.launch,
        )
        totals[:, first : first + count] = sums.sum(2)
    return totals.unflatten(1, (batch, heads)).sum(1)[:, :, :distances]


def document_bounds(segments: Tensor) -> tuple[Tensor, Tensor]:
    """First token of each token's document, and the end of it: [batch, keys] int32 each."""
    in_order, index = segments.sort(dim=1, stable=True)
    first = torch.searchsorted(in_order, segments)
    last = torch.searchsorted(in_order, segments, right=True) - 1
    return index.gather(1, first).int(), index.gather(1, last).int() + 1


def blocks_of(length: int, size: int) -> int:
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


@cache
def all_tiles() -> dict[tuple[int, str, int, int], list[Tiles]]:
    """TILES by compute capability, program, bytes and columns."""
    tiles_of_programs = {}
    for line in TILES.strip().splitlines():
        capability, program, itemsize, most, *cells = line.split()
        tiles = [Tiles(*map(int, re.split("[x/]", cell))) for cell in cells]
        tiles_of_programs[int(capability), program, int(itemsize), int(most)] = tiles
    return tiles_of_programs


def tiles_for(program: str, q: Tensor, flags: dict[str, Any]) -> Tiles:
    """The tiles of a program for queries [batch, heads, queries, head_dim] and its flags."""
    capability = DEFAULT_CAPABILITY  # for the interpreter's CPU too
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    if (capability, program, 2, 64) not in all_tiles():
        capability = DEFAULT_CAPABILITY
    most = 64 if columns(q.shape[3]) <= 64 else 128
    bias, masked, weighted = all_tiles()[capability, program, q.element_size(), most]
    if flags["WEIGHT"] or flags["CONTENT"]:
        return weighted
    return masked if flags["SEGMENTS"] else bias


def columns(head_dim: int) -> int:
    """head_dim as a tile holds it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
