"""What the benchmarks share: rounds in turn, peak memory, conditions, and results on disk."""

import argparse
import contextlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.cli_errors import command_parser
from megatron.commit import commit
from megatron.errors import UserError
from megatron.files import check_output, write_output
from megatron.parallel.machine import total_memory
from megatron.parallel.threads import flush_denormals

SHORTEST = 20  # milliseconds that one measurement lasts at least, by repeating the call
DTYPES = ("float32", "bfloat16", "float16")
FIGURES = ["ms (quartiles)", "ratio (quartiles)", "peak MiB"]
RECORD, PAGE = b'{"conditions": {"command": ', b"<!-- by tools/bench -->"  # marks of the output
Call = Callable[[], Any]


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that the benchmarks share."""
    parser = command_parser(description)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--threads", type=positive, metavar="N", help="on the CPU; 1 gives the least noise")
    add("--rounds", type=positive, default=9, metavar="N", help="each runs every candidate once")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--output", type=Path, metavar="FILE.json", help="JSON there, and Markdown as FILE.md")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class Bench:
    """Runs groups of candidates and keeps a row for each.

    A candidate is a frozen dataclass with `length` and `device`, a property `name`, `prepare()`,
    which gives the call to be timed, and `needs`: bytes of memory without which it cannot run. Its
    fields begin its row. Raises UserError if the options ask for what cannot be.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        on_gpu = options.device == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise UserError("--device: torch finds no CUDA device; use --device cpu")
        output = options.output
        if output:
            if output.suffix != ".json":
                raise UserError(f"--output: {output} does not end in .json - name it so")
            check_output(output, RECORD)
            check_output(output.with_suffix(".md"), PAGE)
        flush_denormals()
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.conditions = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "hardware": torch.cuda.get_device_name() if on_gpu else processor(),
            "clock": "CUDA events" if on_gpu else "CPU time of all threads",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }

    def group(self, candidates: Sequence[Any], references: Sequence[str]) -> list[dict[str, Any]]:
        """Measure candidates against each other: one row each.

        Ratios are to the first of `references` that runs, in the same round.
        """
        calls, reasons = ready(candidates)
        reference = next((name for name in references if name in calls), None)
        times = interleaved(calls, self.options.rounds, self.options.device)
        rows = []
        for one in candidates:
            own = times.get(one.name, [])
            ratios = []
            if own and reference is not None:
                ratios = [mine / theirs for mine, theirs in zip(own, times[reference], strict=True)]
            peak_bytes = None
            if one.name in calls and not self.options.no_memory:
                peak_bytes = peak(one, calls[one.name])
            row = {**asdict(one), "candidate": one.name, "reason": reasons.get(one.name)}
            row |= {"reference": reference, "peak_bytes": peak_bytes, "ms": own}
            for name, numbers in {"ms": own, "ratio": ratios}.items():
                low = middle = high = None
                if numbers:
                    low, middle, high = np.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
                row |= {f"median_{name}": middle, f"quartiles_{name}": [low, high]}
            rows.append(row)
        self.rows += rows
        return rows

    def save(self, markdown: str) -> None:
        """Write what is known so far; an interrupted run leaves whole files."""
        output = self.options.output
        if output:
            record = {"conditions": self.conditions, "rows": self.rows}
            write_output(output, f"{json.dumps(record)}\n".encode(), RECORD)
            page = PAGE + f"\n\n{markdown}\n".encode()
            write_output(output.with_suffix(".md"), page, PAGE)

    @property
    def heading(self) -> str:
        """The command and its conditions in Markdown."""
        facts = self.conditions
        words = [facts["hardware"], f"torch {facts['torch']}", f"threads {facts['threads']}"]
        words += [facts["clock"], f"commit {facts['commit']}", facts["date"][:10]]
        return f"`{facts['command']}`  \n{', '.join(words)}\n"


def ready(candidates: Sequence[Any]) -> tuple[dict[str, Call], dict[str, str]]:
    """The function of each candidate, called once, and why the others do not run, by name.

    All inputs exist before the first call: what fits once fits in every round.
    """
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for first_call in (False, True):
        for one in candidates:
            if one.name in reasons:
                continue
            if one.needs > total_memory():
                reasons[one.name] = f"not run: needs {one.needs / 2**30:.1f} GiB"
                continue
            try:
                if first_call:
                    calls[one.name]()
                else:
                    calls[one.name] = one.prepare()
            except Exception as fault:
                calls.pop(one.name, None)
                ending = "not run" if isinstance(fault, UserError) else "failed"
                words = (str(fault) or type(fault).__name__).splitlines()[0]
                reasons[one.name] = f"{ending}: {words}"
    return calls, reasons


def interleaved(calls: dict[str, Call], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each round, by name. A round calls everything, beginning with another."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        repeats[name] = max(1, min(100, round(SHORTEST / max(clocked(call, 1, device), 0.001))))
    names = list(calls)
    for _ in range(rounds):
        for name in names:
            times[name].append(clocked(calls[name], repeats[name], device))
        names = names[1:] + names[:1]
    return times


def clocked(call: Call, repeats: int, device: str) -> float:
    """Milliseconds of one call, the mean of `repeats`: CPU time, or between two CUDA events."""
    if device == "cpu":
        begin = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - begin) * 1000 / repeats
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def peak(candidate: Any, call: Call) -> int | None:
    """Bytes that one call takes beyond its inputs; None if there is not enough memory."""
    if candidate.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(peak_of_process, candidate, torch.get_num_threads()).result()
        except RuntimeError:  # no memory, or killed for it
            return None


def peak_of_process(candidate: Any, threads: int) -> int:
    """How far the resident memory of this process rises during one call, in bytes."""
    torch.set_num_threads(threads)
    short = replace(candidate, length=min(64, candidate.length))  # loads the libraries
    short.prepare()()
    call = candidate.prepare()
    with contextlib.suppress(OSError):  # Linux: the peak so far is forgotten
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024


def processor() -> str:
    """The name of the CPU, and how many cores it has."""
    name = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
    return f"{name}, {os.cpu_count()} cores"


def figures(row: dict[str, Any]) -> list[str]:
    """A row's cells in the columns FIGURES."""
    cells = []
    for name in ("ms", "ratio"):
        low, high = row[f"quartiles_{name}"]
        middle = row[f"median_{name}"]
        spread = "-" if middle is None else f"{shown(middle)} ({shown(low)}-{shown(high)})"
        cells.append(spread)
    memory = row["peak_bytes"]
    cells.append("-" if memory is None else f"{memory / 2**20:,.0f}")
    return cells


def shown(number: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    lines = []
    for cells in (header, ruler, *rows):
        plain = [cell.replace("|", "/") for cell in cells]
        lines.append(f"| {' | '.join(plain)} |")
    return "\n".join(lines) + "\n"


def report_progress(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)
