"""Compiles our Triton programs for GPUs that need not exist; prints a line of JSON per build."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.attention import triton_kernel, triton_programs

TILES = {
    "forward": triton_kernel.forward_tiles,
    "query_gradient": triton_kernel.query_tiles,
    "key_gradients": triton_kernel.key_tiles,
    "table_gradients": triton_kernel.table_tiles,
}
BUILDS = [  # compute capability, dtype, head_dim, flags
    (90, torch.bfloat16, 64, ""),
    (90, torch.bfloat16, 128, "WEIGHT CHUNK SEGMENTS"),
    (80, torch.float16, 40, "WEIGHT CHUNK SEGMENTS"),
    (80, torch.float32, 64, "WEIGHT"),
]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TABLES = {"bias", "weight", "lse", "delta", "bias_sums", "weight_sums"}
INDICES = {"segments", "bounds"}
MATRICES = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}


def argument(name: str, constant: bool, dtype: str) -> str:
    """The type of a program's argument, as the launcher would find it."""
    if constant:
        return "constexpr"
    if name in TABLES | INDICES:
        return "*i32" if name in INDICES else "*fp32"
    if name in MATRICES:
        return f"*{dtype}"
    return "fp32" if name == "scale" else "i32"


def build(name: str, arch: int, dtype: torch.dtype, head_dim: int, flags: str) -> dict:
    """One cubin: its shared memory in bytes, registers, and the bytes of registers spilled."""
    program = getattr(triton_programs, name)
    signature = {
        one.name: argument(one.name, one.is_constexpr, TYPES[dtype]) for one in program.params
    }
    columns = triton_kernel.columns(head_dim)
    tiles = TILES[name](columns, dtype.itemsize)
    constants = {
        "BLOCK": tiles.keys,
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "PRECISION": "ieee",
    }
    constants |= {"HEAD_DIM": head_dim, "COLUMNS": columns}
    constants |= {flag: flag in flags for flag in ("WEIGHT", "CHUNK", "SEGMENTS")}
    constants = {key: value for key, value in constants.items() if key in signature}
    aligned = [
        index
        for index, (key, kind) in enumerate(signature.items())
        if kind.startswith("*")
        or key.endswith(("_batch", "_head", "_row"))
        or key in ("queries", "keys")
    ]
    source = ASTSource(
        program, signature, constants, {(index,): [["tt.divisibility", 16]] for index in aligned}
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = usage(built.asm["cubin"])
    case = {
        "program": name,
        "arch": arch,
        "dtype": TYPES[dtype],
        "head_dim": head_dim,
        "flags": flags,
    }
    return case | {"shared": built.metadata.shared, "registers": registers, "spilled": stack}


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK):(\d+)", report))
    return int(usage["REG"]), int(usage["STACK"])


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(TILES)
    for name in wanted:
        for case in BUILDS:
            print(json.dumps(build(name, *case)), flush=True)
