"""What the benchmarks share: rounds in turn, peak memory, conditions, and results on disk."""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.cli_errors import command_parser
from megatron.commit import commit
from megatron.files import check_output, write_output
from megatron.parallel.threads import flush_denormals

ON_GPU = torch.cuda.is_available()
SHORTEST = 20  # milliseconds that one measurement lasts at least, by repeating the call
RECORD = b'{"conditions": "`python '  # mark of the output
Call = Callable[[], Any]
Row = dict[str, Any]


class Candidate(NamedTuple):
    """What is timed: make(length) gives the call; facts begin its row.

    `make` goes to another process: it is a function of a module, or a partial of one.
    """

    name: str
    make: Callable[[int], Call]
    length: int
    facts: Row


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that the benchmarks share."""
    parser = command_parser(description)
    add = parser.add_argument
    devices = ["cuda", "cpu"] if ON_GPU else ["cpu"]
    add("--device", default=devices[0], choices=devices)
    threads = "on the CPU; 1 gives the least noise"
    add("--threads", type=positive, default=torch.get_num_threads(), metavar="N", help=threads)
    add("--rounds", type=positive, default=9, metavar="N", help="each runs every candidate once")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--output", type=Path, metavar="FILE.json", help="conditions and every time")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def start(options: argparse.Namespace) -> None:
    """Before the first measurement."""
    if options.output:
        check_output(options.output, RECORD)
    flush_denormals()
    torch.set_num_threads(options.threads)


def measure(candidates: Sequence[Candidate], options: argparse.Namespace) -> list[Row]:
    """Measure candidates against the first of them in the same round: a row each.

    A round runs everything that can run, beginning with another candidate each time.
    """
    rows, running = [], deque()
    for candidate in candidates:
        row = {"candidate": candidate.name, "length": candidate.length, **candidate.facts}
        row |= {"reason": None, "ms": [], "ratios": [], "peak_bytes": None}
        rows.append(row)
        print(f"{candidate.name}, {candidate.length}", file=sys.stderr, flush=True)
        try:
            call = candidate.make(candidate.length)
            call()
        except Exception as fault:
            row["reason"] = repr(fault)
            continue
        repeats = 1 + int(SHORTEST / max(milliseconds(call, 1, options.device), 0.2))
        running.append((row, call, repeats))
        if not options.no_memory:
            row["peak_bytes"] = peak(candidate, call, options)
    for _ in range(options.rounds):
        for row, call, repeats in running:
            row["ms"].append(milliseconds(call, repeats, options.device))
        running.rotate(-1)
    if rows[0]["ms"]:
        for row, *_ in running:
            row["ratios"] = np.divide(row["ms"], rows[0]["ms"]).tolist()
    return rows


def milliseconds(call: Call, repeats: int, device: str) -> float:
    """Of one call, the mean of `repeats`: CPU time of all threads, or until the GPU is idle."""

    def now() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    for _ in range(repeats):
        call()
    return (now() - begin) * 1000 / repeats


def peak(candidate: Candidate, call: Call, options: argparse.Namespace) -> int:
    """Bytes that one call takes beyond its inputs."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(peak_of_process, candidate, options.threads).result()


def peak_of_process(candidate: Candidate, threads: int) -> int:
    """How far the resident memory of this process rises during one call, in bytes."""
    torch.set_num_threads(threads)
    candidate.make(min(64, candidate.length))()  # loads the libraries
    call = candidate.make(candidate.length)
    with contextlib.suppress(OSError):  # Linux: the peak so far is forgotten
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def conditions(device: str) -> str:
    """The command and what its figures depend on, in Markdown."""
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        file = Path("/proc/cpuinfo")
        names = re.findall("model name.*: (.*)", file.read_text()) if file.exists() else []
        hardware = f"{[*names, platform.machine()][0]}, {os.cpu_count()} cores"
    settings = f"torch {torch.__version__}, threads {torch.get_num_threads()}"
    origin = f"commit {commit()}, {time.strftime('%Y-%m-%d')}"
    return f"`{' '.join(['python', *sys.argv])}`  \n{hardware}, {settings}, {origin}\n"


def save(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write what is measured so far; an interrupted run leaves a whole file."""
    if options.output:
        record = {"conditions": conditions(options.device), "rows": rows}
        write_output(options.output, f"{json.dumps(record)}\n".encode(), RECORD)


def figures(row: Row) -> list[str]:
    """Cells of a row: milliseconds or a reason, the ratio with its quartiles, and MiB."""
    if row["reason"]:
        return [row["reason"], "-", "-"]
    low, middle, high = np.quantile(row["ratios"] or [math.nan], [0.25, 0.5, 0.75])
    ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
    peak = row["peak_bytes"]
    memory = "-" if peak is None else f"{peak / 2**20:,.0f}"
    return [f"{np.median(row['ms']):,.2f}", ratio, memory]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ruler, *rows))
