"""What a GPU may decide about our Triton programs: tiles by architecture, and two switches.

Two environment variables choose between ways that compute the same attention. They are for
measurements; the defaults are what the project recommends.

ATTENTION_TABLE_READS: `direct` (default) reads biases and weights straight into the registers of
the products, `pipelined` through shared memory. The numbers are the same.

ATTENTION_FLOAT32: how float32 matrices are multiplied while torch's float32 matmul precision is
"highest". `ieee` (default) is exact and leaves the tensor cores idle; `tf32x3` makes three
products on tensor cores, with errors near those of float32.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.errors import UserError


class Tiles(NamedTuple):
    """Queries and keys of a program's tile, its warps, and its stages of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """Tiles of a program by what else needs registers.

    bias: nothing, beside a bias; masked: chunks or documents; weighted: a weight or a bias by
    content, with or without chunks and documents
    """

    bias: Tiles
    masked: Tiles
    weighted: Tiles


OTHERS = 80
"""GPUs without tiles of their own take those of this compute capability."""

TILES: dict[int, dict[str, dict[tuple[int, int], Sizes]]] = {
    80: {
        "forward": {
            (2, 64): Sizes(Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2)),
            (2, 128): Sizes(Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
            (4, 64): Sizes(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
            (4, 128): Sizes(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
        },
        "query_gradient": {
            (2, 64): Sizes(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
            (2, 128): Sizes(Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
            (4, 64): Sizes(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
            (4, 128): Sizes(Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2)),
        },
        "query_and_table_gradients": {
            (2, 64): Sizes(Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
            (2, 128): Sizes(Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 2)),
            (4, 64): Sizes(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
            (4, 128): Sizes(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
        },
        "key_gradients": {
            (2, 64): Sizes(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 64, 8, 2)),
            (2, 128): Sizes(Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
            (4, 64): Sizes(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
            (4, 128): Sizes(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        },
    },
    90: {
        "forward": {
            (2, 64): Sizes(Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2)),
            (2, 128): Sizes(Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
            (4, 64): Sizes(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
            (4, 128): Sizes(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
        },
        "query_gradient": {
            (2, 64): Sizes(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2)),
            (2, 128): Sizes(Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2)),
            (4, 64): Sizes(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
            (4, 128): Sizes(Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2)),
        },
        "query_and_table_gradients": {
            (2, 64): Sizes(Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 2, 2)),
            (2, 128): Sizes(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
            (4, 64): Sizes(Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(16, 16, 4, 2)),
            (4, 128): Sizes(Tiles(32, 32, 8, 2), Tiles(16, 16, 4, 2), Tiles(16, 16, 4, 2)),
        },
        "key_gradients": {
            (2, 64): Sizes(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2)),
            (2, 128): Sizes(Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2)),
            (4, 64): Sizes(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
            (4, 128): Sizes(Tiles(32, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(32, 16, 8, 1)),
        },
    },
}
"""By compute capability (80 is an A100, 90 an H100 or H200), program, bytes and most columns."""


def tiles_for(program: str, q: Tensor, flags: Mapping[str, Any]) -> Tiles:
    """The tiles of a program for queries [batch, heads, queries, head_dim] and its flags."""
    return tiles_of(program, architecture(q.device), q.element_size(), q.shape[3], flags)


def tiles_of(
    program: str, capability: int, itemsize: int, head_dim: int, flags: Mapping[str, Any]
) -> Tiles:
    """The tiles of a program for elements of that many bytes on a compute capability."""
    sizes = TILES.get(capability, TILES[OTHERS])[program][itemsize, most_columns(head_dim)]
    if flags["WEIGHT"] or flags["CONTENT"]:
        return sizes.weighted
    if flags["CHUNK"] or flags["SEGMENTS"]:
        return sizes.masked
    return sizes.bias


def most_columns(head_dim: int) -> int:
    """The key of TILES for a head_dim."""
    return 64 if columns(head_dim) <= 64 else 128


def architecture(device: torch.device) -> int:
    """A CUDA device's compute capability, 90 for 9.0; OTHERS for the interpreter's CPU."""
    if device.type != "cuda":
        return OTHERS
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def columns(head_dim: int) -> int:
    """head_dim as a tile holds it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def reads_directly(device: torch.device) -> bool:
    """Whether tables are read by an instruction of NVIDIA's; UserError for an unknown switch."""
    direct = _switch("ATTENTION_TABLE_READS", ("direct", "pipelined")) == "direct"
    return direct and device.type == "cuda" and torch.version.cuda is not None


def float32_products(dtype: torch.dtype) -> str:
    """Triton's input_precision for matrices of a dtype; UserError for an unknown switch."""
    chosen = _switch("ATTENTION_FLOAT32", ("ieee", "tf32x3"))
    if dtype != torch.float32:
        return "ieee"  # without a meaning there
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return chosen


def _switch(name: str, values: tuple[str, ...]) -> str:
    """An environment variable that has one of these values, the first if it is not set."""
    value = os.environ.get(name, values[0])
    if value not in values:
        raise UserError(f"{name}: {value!r} is unknown - set it to {' or '.join(values)}")
    return value
