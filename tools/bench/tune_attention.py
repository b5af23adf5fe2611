"""Which tiles of our Triton programs are fastest on this GPU? Prints the lines for triton_tiles.py.

python tools/bench/tune_attention.py
python tools/bench/tune_attention.py --dtypes fp32 --head_dims 128 --programs forward

On a machine with CUDA every candidate is timed in the attention that it is for, forward or
backward, with a logarithmic bias, in rounds of rotated order; the time is the median of the whole
pass. What is not done after --seconds is left out. The fastest tiles are those for a bias alone,
the first of the three in TILES. Elsewhere the candidates are only compiled, for --archs, and
those that spill are dropped. The default tiles come first, so they are always among them.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from bench_tables import table
from measure import positive
from torch import Tensor

from megatron.attention.triton_kernel import triton_attention
from megatron.attention.triton_tiles import (
    OTHERS,
    TILES,
    Tiles,
    architecture,
    most_columns,
    tiles_of,
)
from megatron.cli_errors import guarded
from megatron.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROGRAMS = tuple(TILES[OTHERS])
HALF = {
    "forward": "128 64 8 2, 128 64 8 3, 128 64 4 2, 128 128 8 2, 64 64 4 2, 64 64 4 3, 128 32 4 3",
    "query_gradient": "64 64 4 2, 64 64 4 3, 64 64 8 2, 128 64 8 2, 128 32 8 2, 64 32 4 2",
    "query_and_table_gradients": "64 64 4 2, 64 64 4 1, 64 64 4 3, 64 64 8 2, 32 32 4 2, 32 32 2 2",
    "key_gradients": "64 64 4 2, 64 64 4 1, 64 64 8 2, 32 64 4 2, 32 128 8 2, 128 64 8 2",
}
"""Queries, keys, warps and stages of candidates for elements of 2 bytes."""
FULL = {
    "forward": "64 32 8 2, 64 32 4 2, 64 64 8 2, 32 32 4 2, 32 32 8 2, 128 32 8 2",
    "query_gradient": "64 32 8 2, 64 32 8 1, 32 32 4 2, 32 32 8 2, 16 32 4 2",
    "query_and_table_gradients": "32 32 8 2, 32 32 4 2, 32 32 4 1, 16 16 4 2",
    "key_gradients": "32 32 8 1, 32 64 8 1, 32 32 8 2, 32 16 8 1",
}
BIAS_ALONE = {"WEIGHT": False, "CHUNK": False, "SEGMENTS": False, "CONTENT": 0}
ROUNDS = 7
SHARE_OF_COMPILING = 0.6  # of --seconds
COMPILERS = 8  # processes at most


class Candidate(NamedTuple):
    """Tiles that one program may have."""

    program: str
    dtype: str
    head_dim: int
    tiles: Tiles

    @property
    def place(self) -> tuple[int, int]:
        """Where its tiles stand in TILES: bytes of an element, most columns."""
        return DTYPES[self.dtype].itemsize, most_columns(self.head_dim)


def candidates(programs: Sequence[str], dtype: str, head_dim: int, arch: int) -> list[Candidate]:
    """The default tiles of each program first, then what may be faster."""
    found = []
    itemsize = DTYPES[dtype].itemsize
    sizes = FULL if itemsize == 4 else HALF
    for program in programs:
        default = tiles_of(program, arch, itemsize, head_dim, BIAS_ALONE)
        others = [Tiles(*map(int, one.split())) for one in sizes[program].split(",")]
        for tiles in dict.fromkeys([default, *others]):
            found.append(Candidate(program, dtype, head_dim, tiles))
    return found


@contextmanager
def in_use(candidate: Candidate, arch: int) -> Iterator[None]:
    """TILES with the candidate in place of the default."""
    sizes = TILES.setdefault(arch, TILES[OTHERS])[candidate.program]
    default = sizes[candidate.place]
    sizes[candidate.place] = default._replace(bias=candidate.tiles)
    try:
        yield
    finally:
        sizes[candidate.place] = default


def prepared(
    candidate: Candidate, length: int, *, tokens: int = 16384, device: str = "cuda"
) -> Callable[[], Any]:
    """A call of attention that runs the program: 12 heads, as many windows as tokens allow."""
    shape = (4, max(1, tokens // length), 12, length, candidate.head_dim)
    q, k, v, dout = torch.randn(shape, device=device).to(DTYPES[candidate.dtype])
    bias = -torch.rand(12, length, device=device).cumsum(1).log1p()
    leaves = [q, k, v, bias]
    if candidate.program == "forward":
        return torch.no_grad()(lambda: attend(*leaves))
    if candidate.program != "query_and_table_gradients":
        leaves = leaves[:3]
    for leaf in leaves:
        leaf.requires_grad_()
    out = attend(q, k, v, bias)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Causal attention with a bias, by our kernel."""
    return triton_attention(
        q, k, v, bias, weight=None, window=None, chunk=None, segments=None, index_bias=None
    )


def compiled(candidate: Candidate) -> str:
    """Run it once, which leaves its program in Triton's cache; why it cannot run, or nothing."""
    arch = architecture(torch.device("cuda"))
    try:
        with in_use(candidate, arch):
            prepared(candidate, 256)()
            torch.cuda.synchronize()
    except Exception as error:  # a compiler fails in many ways, and the others are still of use
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    return ""


def compile_all(all_of_them: list[Candidate], seconds: float) -> tuple[list[Candidate], list[str]]:
    """Those that run, and a line for each that does not or was not compiled in time."""
    ready, failures = [], []
    deadline = time.monotonic() + seconds
    processes = min(COMPILERS, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    waiting = [(one, pool.submit(compiled, one)) for one in all_of_them]
    for candidate, result in waiting:
        try:
            reason = result.result(timeout=max(0.0, deadline - time.monotonic()))
        except OutOfTime:
            reason = "not compiled in time"
        except BrokenProcessPool:
            reason = "its process ended"
        if reason:
            failures.append(f"{candidate.program} {tuple(candidate.tiles)}: {reason}")
        else:
            ready.append(candidate)
    pool.shutdown(wait=False, cancel_futures=True)
    return ready, failures


def timed(ready: list[Candidate], length: int, deadline: float) -> dict[Candidate, float]:
    """Median milliseconds of each candidate, as many rounds as the time allows."""
    arch = architecture(torch.device("cuda"))
    times: dict[Candidate, list[float]] = {one: [] for one in ready}
    for number in range(ROUNDS):
        for candidate in ready[number:] + ready[:number]:
            if time.monotonic() > deadline:
                break
            with in_use(candidate, arch):
                times[candidate].append(milliseconds(prepared(candidate, length)))
    return {one: statistics.median(found) for one, found in times.items() if found}


def milliseconds(call: Callable[[], Any]) -> float:
    """Of one call among five, after two that warm up."""
    for _ in range(2):
        call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(5):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 5


def tune(options: argparse.Namespace) -> str:
    """Times on this GPU, and the fastest tiles as lines of TILES."""
    start = time.monotonic()
    arch = architecture(torch.device("cuda"))
    everything = wanted(options, arch)
    ready, failures = compile_all(everything, options.seconds * SHARE_OF_COMPILING)
    times = timed(ready, options.length, start + options.seconds)
    rows = []
    fastest: dict[tuple[str, str, int], Candidate] = {}
    for candidate, ms in times.items():
        rows.append([*described(candidate), f"{ms:.3f}"])
        group = (candidate.program, candidate.dtype, candidate.head_dim)
        best = fastest.get(group)
        if best is None or ms < times[best]:
            fastest[group] = candidate
    header = ["program", "dtype", "head_dim", "tiles", "ms"]
    return "\n".join([table(header, rows), *failures, "", pasted(list(fastest.values()), arch)])


def wanted(options: argparse.Namespace, arch: int) -> list[Candidate]:
    """The candidates of all wanted programs, dtypes and head dimensions."""
    found = []
    for dtype in options.dtypes:
        for head_dim in options.head_dims:
            found += candidates(options.programs, dtype, head_dim, arch)
    return found


def compile_only(options: argparse.Namespace) -> str:
    """Figures of the compiler for candidates that do not spill, and how many spill.

    UserError where Triton interprets, so that it compiles nothing.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET: at 1 Triton compiles nothing; set it to 0")
    from triton_builds import Case, build

    rows = []
    dropped = 0
    for arch in options.archs:
        for candidate in wanted(options, arch):
            case = Case(candidate.program, arch, candidate.dtype, candidate.head_dim)
            built = build(case, candidate.tiles)
            if built["spilled"]:
                dropped += 1
                continue
            kib = f"{built['shared'] / 1024:.1f}"
            rows.append([str(arch), *described(candidate), kib, str(built["registers"])])
    header = ["arch", "program", "dtype", "head_dim", "tiles", "shared KiB", "registers"]
    return f"{table(header, rows)}\n{dropped} candidates spill and are dropped; nothing was timed"


def described(candidate: Candidate) -> list[str]:
    tiles = " ".join(map(str, candidate.tiles))
    return [candidate.program, candidate.dtype, str(candidate.head_dim), tiles]


def pasted(fastest: list[Candidate], arch: int) -> str:
    """Lines of TILES in megatron/attention/triton_tiles.py."""
    lines = [f"{arch}: {{"]
    for program in dict.fromkeys(one.program for one in fastest):
        lines.append(f'    "{program}": {{')
        for one in fastest:
            if one.program == program:
                default = TILES.get(arch, TILES[OTHERS])[program][one.place]
                sizes = default._replace(bias=one.tiles)
                texts = [f"Tiles{tuple(tiles)}" for tiles in sizes]
                lines.append(f"        {one.place}: Sizes({', '.join(texts)}),")
        lines.append("    },")
    return "\n".join([*lines, "},"])


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    add("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    add("--head_dims", nargs="+", type=positive, default=[64])
    add("--length", type=positive, default=2048, help="tokens of a window")
    add("--seconds", type=float, default=110.0, help="of the whole run on a GPU")
    add("--archs", nargs="+", type=int, choices=TILES, default=list(TILES))
    options = parser.parse_args(argv)
    print(tune(options) if torch.cuda.is_available() else compile_only(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
