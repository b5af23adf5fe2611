"""Compile the Triton programs of a training in bfloat16 for GPUs that need not exist.

Prints a line of JSON for each: its shared memory in bytes.
Triton must not interpret (TRITON_INTERPRET=0). The first word is the GPUs' compute capability.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.attention import triton_programs
from megatron.attention.triton_passes import Tiles, all_tiles, columns

HEAD_DIM = 64
FLOATS = {
    "bias",
    "weight",
    "lse",
    "dlse",
    "delta",
    "dbias",
    "dweight",
    "u",
    "w",
    "du",
    "dw",
}
MATRICES = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
OFF = ("WEIGHT", "SEGMENTS", "CONTENT", "ONES")


def build(name: str, arch: int, tiles: Tiles) -> dict[str, Any]:
    """A program with a bias alone."""
    with_tables = name == "query_and_table_gradients"
    program = getattr(triton_programs, "query_gradient" if with_tables else name)
    signature = {}
    aligned = {}  # pointers, strides and usual lengths are multiples of 16
    for index, argument in enumerate(program.params):
        kind = "i32"
        if argument.is_constexpr:
            kind = "constexpr"
        elif argument.name in FLOATS:
            kind = "*fp32"
        elif argument.name in ("begins", "ends"):
            kind = "*i32"
        elif argument.name in MATRICES:
            kind = "*bf16"
        elif argument.name == "scale":
            kind = "fp32"
        signature[argument.name] = kind
        is_length = argument.name.endswith(("_batch", "_head", "_row", "queries", "keys"))
        if kind.startswith("*") or (kind == "i32" and is_length):
            aligned[(index,)] = [["tt.divisibility", 16]]
    constants_of_programs = dict.fromkeys(OFF, False)
    constants_of_programs |= {
        "PRECISION": "ieee",
        "DIRECT": True,
        "TABLES": with_tables,
    }
    constants_of_programs |= {"BLOCK_Q": tiles.queries, "BLOCK_K": tiles.keys}
    constants_of_programs |= {"HEAD_DIM": HEAD_DIM, "COLUMNS": columns(HEAD_DIM)}
    constants = {
        name: constants_of_programs[name] for name, kind in signature.items() if kind == "constexpr"
    }
    source = ASTSource(program, signature, constants, aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"program": name, "shared": built.metadata.shared}


if __name__ == "__main__":
    for (arch, name, itemsize, most), (tiles, _, _) in all_tiles().items():
        if (arch, itemsize, most) == (int(sys.argv[1]), 2, HEAD_DIM):
            print(json.dumps(build(name, arch, tiles)))
