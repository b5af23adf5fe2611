"""What the benchmarks share: rounds in turn, peak memory, conditions, and results on disk."""

import argparse
import ctypes
import json
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.cli_errors import command_parser
from megatron.commit import commit
from megatron.files import check_output, write_output
from megatron.parallel.threads import flush_denormals

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # of steps and products
SHORTEST = 20  # milliseconds that one measurement lasts at least, by repeating the call
RECORD = b'{"conditions": "`python '  # mark of the output
HEADER = """\
|  | ms | time (quartiles) | peak MiB | tokens/s | MFU % |
| --- | ---: | ---: | ---: | ---: | ---: |
"""
Call = Callable[[], Any]
Row = dict[str, Any]


class Candidate(NamedTuple):
    """What is timed: make() gives the call, on `tokens` in all.

    flops: operations of the call; 0 if they are not counted
    """

    name: str
    make: Callable[[], Call]
    tokens: int
    flops: int = 0


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that the benchmarks share."""
    parser = command_parser(description)
    add = parser.add_argument
    threads = "on the CPU; 1 gives the least noise"
    add("--threads", type=positive, default=torch.get_num_threads(), metavar="N", help=threads)
    add("--rounds", type=positive, default=9, metavar="N", help="each runs every candidate once")
    add("--output", type=Path, metavar="FILE.json", help="conditions and every time")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run(groups: Iterable[tuple[str, Sequence[Candidate]]], options: argparse.Namespace) -> int:
    """Measure titled groups; each is printed and written when it ends. 1 if something cannot run.

    Ratios are to the group's first candidate in the same round, MFU to the measured speed of matrix
    products.
    """
    if options.output:
        check_output(options.output, RECORD)
    flush_denormals()
    torch.set_num_threads(options.threads)
    print(conditions())
    size = 4096 if ON_GPU else 1024
    a, b = torch.randn(2, size, size, device=DEVICE).to(DTYPE)
    fastest_ms = min(milliseconds(lambda: a @ b, 3) for _ in range(6))
    rows = []
    for title, candidates in groups:
        measured = measure(title, candidates, options.rounds)
        rows += measured
        if options.output:
            record = {"conditions": conditions(), "rows": rows}
            write_output(options.output, f"{json.dumps(record)}\n".encode(), RECORD)
        lines = [line_of(row, 2 * size**3 / fastest_ms) for row in measured]
        print(f"#### {title}\n\n{HEADER}{''.join(lines)}", flush=True)
    return int(any(row["reason"] for row in rows))


def measure(title: str, candidates: Sequence[Candidate], rounds: int) -> list[Row]:
    """A row for each candidate.

    A round runs everything that can run, beginning with another candidate each time.
    """
    rows, running = [], deque()
    for name, make, tokens, flops in candidates:
        row = {"group": title, "candidate": name, "tokens": tokens, "flops": flops}
        row |= {"reason": None, "ms": [], "ratios": [], "peak_bytes": None}
        rows.append(row)
        print(name, file=sys.stderr, flush=True)
        try:
            call = make()
            call()
        except Exception as fault:
            row["reason"] = repr(fault)
            continue
        repeats = 1 + int(SHORTEST / max(milliseconds(call, 1), 0.2))
        running.append((row, call, repeats))
        row["peak_bytes"] = peak(call)
    for _ in range(rounds):
        for row, call, repeats in running:
            row["ms"].append(milliseconds(call, repeats))
        running.rotate(-1)
    for row, *_ in running:
        row["ratios"] = [
            mine / other for mine, other in zip(row["ms"], rows[0]["ms"], strict=False)
        ]
    return rows


def milliseconds(call: Call, repeats: int) -> float:
    """Of one call, the mean of `repeats`: CPU time of all threads, or until the GPU is idle."""

    def clock() -> float:
        if DEVICE == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) * 1000 / repeats


def peak(call: Call) -> int:
    """Bytes that a call takes beyond its inputs; on the CPU, how far this process grows."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed is no longer this process's
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = largest_size()
    call()
    return largest_size() - before


def largest_size() -> int:
    """The most bytes that this process had since its peak was forgotten.

    ru_maxrss also has the size of the process that started this one, below which nothing shows.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def conditions() -> str:
    """The command and what its figures depend on, in Markdown."""
    if ON_GPU:
        hardware = torch.cuda.get_device_name()
    else:
        file = Path("/proc/cpuinfo")
        names = re.findall("model name.*: (.*)", file.read_text()) if file.exists() else []
        hardware = f"{[*names, platform.machine()][0]}, {os.cpu_count()} cores"
    settings = f"torch {torch.__version__}, threads {torch.get_num_threads()}"
    origin = f"commit {commit()}, {time.strftime('%Y-%m-%d')}"
    return f"`{' '.join(['python', *sys.argv])}`  \n{hardware}, {settings}, {origin}\n"


def line_of(row: Row, flops_per_ms: float) -> str:
    """A line of the table: the reason, or the figures in the order of HEADER."""
    if row["reason"]:
        cells = [row["reason"], *"----"]
    else:
        ms = float(np.median(row["ms"]))
        low, ratio, high = np.quantile(row["ratios"] or [np.nan], [0.25, 0.5, 0.75])
        cells = [
            f"{ms:,.2f}",
            f"{ratio:.3g} ({low:.3g}-{high:.3g})",
            f"{row['peak_bytes'] / 2**20:,.0f}",
            f"{row['tokens'] * 1000 / ms:,.0f}",
            f"{100 * row['flops'] / ms / flops_per_ms:.1f}",
        ]
    return f"| {' | '.join([row['candidate'], *cells])} |\n"
