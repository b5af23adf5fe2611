"""Attention on CUDA by our own Triton programs, which read the distance tables and give them exact gradients.

The tables' gradients are deterministic: no atomics, and every tile size is a fixed function of shape and dtype.
"""

# A program is launched with more than its Python signature says.
# pyright: reportCallIssue=false, reportArgumentType=false

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGEST_HEAD = 128
MOST_PROGRAMS = 65535  # along the second dimension of CUDA's grid
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PROGRAMS = 2048
"""How many programs the tables' gradients are split into at least, where there is that much to do."""


class Tiles(NamedTuple):
    """How a program is cut: queries and keys of a tile, warps, and stages of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def triton_attention(
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
    """See megatron.attention.attention; ValueError with the reason where `refusal` gives one."""
    reason = refusal(q, index_bias=index_bias)
    if reason is not None:
        raise ValueError(f"attention_backend: triton cannot compute this: {reason}")
    keys = k.shape[2]
    window, chunk = min(window or keys, keys), min(chunk or keys, keys)
    if segments is not None:
        segments = segments.to(torch.int32).contiguous()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Attention.apply(q, k, v, bias, weight, segments, window, chunk)  # pyright: ignore[reportReturnType]


def refusal(q: Tensor, *, index_bias: object = None) -> str | None:
    """Why these inputs are not for Triton, in one sentence, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if q.device.type != "cuda" and not (
        q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    ):
        return f"it runs on CUDA devices, not on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"it knows float16, bfloat16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > LARGEST_HEAD:
        return f"head_dim {q.shape[3]} is more than {LARGEST_HEAD}"
    if q.shape[0] * q.shape[1] > MOST_PROGRAMS:
        return f"batch {q.shape[0]} times heads {q.shape[1]} is more than {MOST_PROGRAMS}"
    if index_bias is not None:
        return "it reads biases from a table by distance, not by indices"
    return None


def columns(head_dim: int) -> int:
    """head_dim as a tile holds it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def forward_tiles(columns: int, itemsize: int) -> Tiles:
    """Of the forward pass, by the columns of a tile and the bytes of an element."""
    return Tiles(64, 32, 8, 2) if itemsize == 4 else Tiles(128, 64, 8, 2)


def query_tiles(columns: int, itemsize: int) -> Tiles:
    """Of the gradient of q."""
    if itemsize == 4:
        return Tiles(64, 32, 8, 2)
    return Tiles(64, 64, 4, 2) if columns <= 64 else Tiles(128, 32, 8, 2)


def key_tiles(columns: int, itemsize: int) -> Tiles:
    """Of the gradients of k and v."""
    if itemsize == 4:
        return Tiles(32, 64, 8, 1)
    return Tiles(64, 64, 4, 2) if columns <= 64 else Tiles(64, 64, 8, 2)


def table_tiles(columns: int, itemsize: int) -> Tiles:
    """Of the tables' gradients; as many queries as keys."""
    if itemsize == 4:
        return Tiles(32, 32, 4, 2)
    return Tiles(64, 64, 4, 2) if columns <= 64 else Tiles(64, 64, 8, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        segments: Tensor | None,
        window: int,
        chunk: int,
    ) -> Tensor:
        from megatron.attention.triton_programs import forward

        tables = _tables(q.shape[1], k.shape[2], bias, weight, window, q.device)
        out = _by_length(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        tiles = forward_tiles(columns(q.shape[3]), q.element_size())
        reach = _first_keys(segments, q.shape[2], tiles)
        with torch.cuda.device_of(q):
            forward[(-(-q.shape[2] // tiles.queries), q.shape[0] * q.shape[1])](
                *(q, k, v, *tables, *_pointers(segments, reach, lse), out, lse),
                *_strides(q, k, v),
                *_sizes(q, k, tables[0], window, chunk),
                **_flags(q, k, weight, chunk, segments),
                **_launch(tiles),
            )
        ctx.save_for_backward(q, k, v, bias, weight, segments, *tables, out, lse)
        ctx.window, ctx.chunk = window, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        from megatron.attention.triton_programs import key_gradients, query_gradient

        q, k, v, bias, weight, segments, *tables, out, lse = ctx.saved_tensors
        if out_gradient.stride(-1) != 1:
            out_gradient = out_gradient.contiguous()
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        dq, dk, dv, delta = _by_length(q), _by_length(k), _by_length(v), torch.empty_like(lse)
        strides = _strides(q, k, v, out_gradient)
        sizes = _sizes(q, k, tables[0], ctx.window, ctx.chunk)
        flags = _flags(q, k, weight, ctx.chunk, segments)
        with torch.cuda.device_of(q):
            tiles = query_tiles(columns(q.shape[3]), q.element_size())
            query_gradient[(-(-queries // tiles.queries), batch * heads)](
                *(
                    q,
                    k,
                    v,
                    *tables,
                    *_pointers(segments, _first_keys(segments, queries, tiles), lse),
                ),
                *(out, lse, out_gradient, delta, dq, *strides, *sizes),
                **flags,
                **_launch(tiles),
            )
            tiles = key_tiles(columns(q.shape[3]), q.element_size())
            key_gradients[(-(-keys // tiles.keys), batch * heads)](
                *(
                    q,
                    k,
                    v,
                    *tables,
                    *_pointers(segments, _last_queries(segments, queries, tiles), lse),
                ),
                *(lse, out_gradient, delta, dk, dv, *strides, *sizes),
                **flags,
                **_launch(tiles),
            )
            wanted = ctx.needs_input_grad[3:5]
            sums = (None, None)
            if any(wanted):
                rows = (q, k, v, *tables, segments, lse, out_gradient, delta)
                sums = _table_gradients(*rows, ctx.window, ctx.chunk, flags)
        d_bias, d_weight = (
            F.pad(total, (0, table.shape[1] - keys)).to(table.dtype) if asked else None
            for total, table, asked in zip(sums, (bias, weight), wanted, strict=True)
        )
        return dq, dk, dv, d_bias, d_weight, None, None, None


def _table_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    weight: Tensor,
    segments: Tensor | None,
    lse: Tensor,
    out_gradient: Tensor,
    delta: Tensor,
    window: int,
    chunk: int,
    flags: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Sums over batch and along diagonals for bias and weight: [heads, keys] float32."""
    from megatron.attention.triton_programs import table_gradients

    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    tiles = table_tiles(columns(q.shape[3]), q.element_size())
    blocks = -(-keys // tiles.keys)
    offsets = min(
        blocks, (min(window, 2 * chunk) - 2) // tiles.keys + 2
    )  # a tile further back is out of sight
    splits = min(-(-PROGRAMS // (heads * offsets)), batch * blocks)
    shape = (splits, heads, offsets, 2, tiles.keys)
    bias_sums = q.new_empty(shape, dtype=torch.float32)
    weight_sums = q.new_empty(shape, dtype=torch.float32) if flags["WEIGHT"] else bias_sums
    table_gradients[(offsets, heads, splits)](
        *(
            q,
            k,
            v,
            bias,
            weight,
            *_pointers(segments, None, lse),
            lse,
            out_gradient,
            delta,
            bias_sums,
            weight_sums,
        ),
        *_strides(q, k, v, out_gradient),
        *(bias.stride(0), batch, heads, queries, keys, chunk, _scale(q)),
        **flags,
        BLOCK=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return _by_distance(bias_sums, keys), _by_distance(weight_sums, keys) if flags[
        "WEIGHT"
    ] else None


def _by_distance(sums: Tensor, keys: int) -> Tensor:
    """[splits, heads, offsets, 2, block], as `table_gradients` writes them -> [heads, keys]."""
    near, far = sums.sum(0).unbind(
        2
    )  # of distances offset · block + 0 …, and of those a block nearer
    near[:, :-1] += far[:, 1:]
    table = near.flatten(1)[:, :keys]
    return F.pad(table, (0, keys - table.shape[1]))


def _tables(
    heads: int,
    keys: int,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int,
    device: torch.device,
) -> list[Tensor]:
    """Both tables at distance 0, of [heads, PAD + keys + PAD] float32: the bias in base 2, -inf out of sight."""
    from megatron.attention.triton_programs import PAD

    padded = [torch.full((heads, keys + 2 * PAD), -math.inf, device=device)]
    if bias is None:
        padded[0][:, PAD : PAD + window] = 0.0
    else:
        padded[0][:, PAD : PAD + window] = bias[:, :window].float() * math.log2(math.e)
    if weight is not None:
        padded.append(F.pad(weight[:, :keys].float(), (PAD, PAD)))
    return [padded[0][:, PAD:], padded[-1][:, PAD:]]  # a weight that is absent is not read


def _first_keys(segments: Tensor | None, queries: int, tiles: Tiles) -> Tensor | None:
    """For every block of queries the first key that may be of one of its documents: [batch, blocks] int32."""
    if segments is None:
        return None
    return (_meet(segments, queries, tiles).byte().argmax(2) * tiles.keys).to(torch.int32)


def _last_queries(segments: Tensor | None, queries: int, tiles: Tiles) -> Tensor | None:
    """For every block of keys the end of the queries that may be of one of its documents: [batch, blocks] int32."""
    if segments is None:
        return None
    meet = _meet(segments, queries, tiles)
    return ((meet.shape[1] - meet.byte().flip(1).argmax(1)) * tiles.queries).to(torch.int32)


def _meet(segments: Tensor, queries: int, tiles: Tiles) -> Tensor:
    """Whether the ranges of documents in a block of queries and one of keys overlap: [batch, queries', keys'] bool."""
    keys = segments.shape[1]
    bounds = []
    for first, size in ((keys - queries, tiles.queries), (0, tiles.keys)):
        count = -(-(keys - first) // size) * size
        index = (first + torch.arange(count, device=segments.device)).clamp(max=keys - 1)
        bounds.append(segments[:, index].unflatten(1, (-1, size)).aminmax(dim=2))
    query, key = bounds
    return (query.min[:, :, None] <= key.max[:, None]) & (key.min[:, None] <= query.max[:, :, None])


def _by_length(x: Tensor) -> Tensor:
    """Empty, of the same shape [batch, heads, length, head_dim], laid out as [batch, length, heads, head_dim]."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _scale(q: Tensor) -> float:
    return math.log2(math.e) / math.sqrt(q.shape[3])


def _pointers(
    segments: Tensor | None, reach: Tensor | None, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Something to point to where there is none; the programs do not read it."""
    return other if segments is None else segments, other if reach is None else reach


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _sizes(q: Tensor, k: Tensor, table: Tensor, window: int, chunk: int) -> tuple[Any, ...]:
    return table.stride(0), q.shape[1], q.shape[2], k.shape[2], window, chunk, _scale(q)


def _flags(
    q: Tensor, k: Tensor, weight: Tensor | None, chunk: int, segments: Tensor | None
) -> dict[str, Any]:
    fast = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return {
        "HEAD_DIM": q.shape[3],
        "COLUMNS": columns(q.shape[3]),
        "WEIGHT": weight is not None,
        "CHUNK": chunk < k.shape[2],
        "SEGMENTS": segments is not None,
        "PRECISION": "tf32" if fast else "ieee",
    }


def _launch(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
