"""Compile our Triton programs for GPUs that need not exist; print a line of JSON for each build.

python tools/bench/triton_builds.py
python tools/bench/triton_builds.py --programs forward --reads pipelined --cases all

Each line has the shared memory in bytes, the registers of a thread, and the bytes that a thread
spills to memory. Nothing is run. Triton must not interpret (TRITON_INTERPRET=0).
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.attention import triton_programs
from megatron.attention.triton_tiles import TILES, Tiles, columns, tiles_of

PROGRAMS = tuple(TILES[80])
FLAGS = ("WEIGHT", "CHUNK", "SEGMENTS")
ALL_FLAGS = " ".join(FLAGS)
CLASSES = ("", "CHUNK SEGMENTS", "WEIGHT", ALL_FLAGS, "CONTENT", f"{ALL_FLAGS} CONTENT")
"""Flags of which tiles depend."""
WITH_TABLES = "query_and_table_gradients"  # query_gradient with its flag TABLES
READS = ("direct", "pipelined")
PRODUCTS = ("ieee", "tf32", "tf32x3")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = {"bias", "weight", "lse", "delta", "dbias", "dweight", "u", "w", "w_low", "du", "dw"}
INDICES = {"segments", "bounds"}
MATRICES = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}


class Case(NamedTuple):
    """What one program is compiled for."""

    program: str
    arch: int
    dtype: str
    head_dim: int
    flags: str = ""
    reads: str = "direct"
    products: str = "ieee"


def training_cases(programs: Sequence[str], reads: str) -> list[Case]:
    """What a training in bfloat16 runs, on every architecture."""
    return [Case(program, arch, "bf16", 64, "", reads) for program in programs for arch in TILES]


def usual_cases(programs: Sequence[str], reads: str) -> list[Case]:
    """Those of a training, and one of each other kind."""
    found = training_cases(programs, reads)
    for program in programs:
        found.append(Case(program, 90, "bf16", 128, ALL_FLAGS, reads))
        found.append(Case(program, 80, "fp16", 40, ALL_FLAGS, reads))
        found.append(Case(program, 80, "fp32", 64, "WEIGHT", reads))
    return found


def all_cases(programs: Sequence[str], reads: str) -> list[Case]:
    """Every kind of tile on every architecture, with a bias alone and with all flags."""
    found = []
    kinds = itertools.product(programs, TILES, ("bf16", "fp32"), (64, 128), CLASSES)
    for program, arch, dtype, head_dim, flags in kinds:
        found.append(Case(program, arch, dtype, head_dim, flags, reads))
    return found


CASES = {"training": training_cases, "usual": usual_cases, "all": all_cases}


def build(case: Case, tiles: Tiles | None = None) -> dict[str, Any]:
    """A case with its tiles (the default ones if None), shared memory, registers and spills."""
    itemsize = DTYPES[case.dtype].itemsize
    flags: dict[str, Any] = {flag: flag in case.flags for flag in FLAGS}
    flags["CONTENT"] = 2 if "CONTENT" in case.flags else 0  # w in two numbers, and u: the most
    if tiles is None:
        tiles = tiles_of(case.program, case.arch, itemsize, case.head_dim, flags)
    name = "query_gradient" if case.program == WITH_TABLES else case.program
    program = getattr(triton_programs, name)
    signature = {}
    for one in program.params:
        signature[one.name] = "constexpr" if one.is_constexpr else _type(one.name, case.dtype)
    known = flags | _constants(case, tiles)
    constants = {name: known[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(program, signature, constants, _aligned(signature))
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    built = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    registers, spilled = _usage(built.asm["cubin"])
    return case._asdict() | {
        "tiles": tiles,
        "shared": built.metadata.shared,
        "registers": registers,
        "spilled": spilled,
        "triton": triton.__version__,
    }


def _type(name: str, dtype: str) -> str:
    """The type of a program's argument, as the launcher would find it."""
    if name in TABLES:
        return "*fp32"
    if name in INDICES:
        return "*i32"
    if name in MATRICES:
        return f"*{dtype}"
    return "fp32" if name == "scale" else "i32"


def _constants(case: Case, tiles: Tiles) -> dict[str, Any]:
    return {
        "TABLES": case.program == WITH_TABLES,
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "HEAD_DIM": case.head_dim,
        "COLUMNS": columns(case.head_dim),
        "DIRECT": case.reads == "direct",
        "BOUNDS": "SEGMENTS" in case.flags,
        "PRECISION": case.products,
        "ONES": False,
    }


def _aligned(signature: dict[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """The arguments that are multiples of 16: pointers, strides and usual lengths."""
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, (name, kind) in enumerate(signature.items()):
        is_pointer = kind.startswith("*")
        is_stride = name.endswith(("_batch", "_head", "_row"))
        if is_pointer or is_stride or name in ("queries", "keys"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return attributes


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK):(\d+)", report))
    return int(usage["REG"]), int(usage["STACK"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    add("--reads", choices=READS, default="direct", help="how tables are read")
    add("--cases", choices=CASES, default="usual")
    options = parser.parse_args(argv)
    for case in CASES[options.cases](options.programs, options.reads):
        print(json.dumps(build(case)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
