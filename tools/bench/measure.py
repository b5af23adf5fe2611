"""What the benchmarks share: interleaved timing, peak memory, floors, and results on disk."""

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from megatron.commit import commit
from megatron.errors import UserError
from megatron.files import write_text

SHORTEST = 0.02  # seconds that one measurement lasts at least, by repeating the call
# A process does so much before its memory is measured, so that libraries are loaded.
WARM_LENGTH = 64
MEMORY = "/proc/meminfo"
DTYPES = ("float32", "bfloat16", "float16")
Call = Callable[[], Any]
Timing = dict[str, float]  # ms, wall_ms


def arguments(description: str, quick: dict[str, Any]) -> argparse.ArgumentParser:
    """The options that the benchmarks share.

    quick: what --quick sets where an option is not given
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads on the CPU; default: torch's. 1 gives the least noise",
    )
    add(
        "--rounds",
        type=positive,
        default=9,
        metavar="N",
        help="every round runs each candidate once, order rotated",
    )
    add(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="a candidate that has run so long skips later rounds",
    )
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="candidates with one of these words in their name",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="write JSON there, and Markdown beside it as FILE.md",
    )
    settings = ", ".join(f"{key}={value}" for key, value in quick.items())
    add("--quick", action="store_true", help=f"a run of minutes: {settings}")
    return parser


def parsed(
    parser: argparse.ArgumentParser, quick: dict[str, Any], argv: Sequence[str] | None
) -> argparse.Namespace:
    """The options, checked; UserError where the output cannot be written."""
    words = sys.argv[1:] if argv is None else argv
    if "--quick" in words:
        parser.set_defaults(**quick)
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch finds no CUDA device; use --device cpu")
    output = options.output
    if output and (output.suffix != ".json" or not output.parent.is_dir()):
        raise UserError(f"--output: {output} must end in .json and lie in a folder that exists")
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class Bench:
    """Runs groups of candidates and keeps their rows.

    A candidate is a frozen dataclass with

    * `length` and `device`, and a property `name`;
    * prepare() -> the call to be timed;
    * flops and bytes, which the work takes at least;
    * needs: bytes of memory without which it cannot run.

    Its fields begin its row.
    """

    def __init__(self, options: argparse.Namespace, title: str) -> None:
        self.options = options
        self.title = title
        self.rows: list[dict[str, Any]] = []
        self.peaks: dict[str, dict[str, float]] = {}
        self.conditions = conditions(options)

    def group(
        self, candidates: Sequence[Any], references: Sequence[str], dtype: str
    ) -> list[dict[str, Any]]:
        """Measure candidates against each other: one row each.

        Ratios are to the first of `references` that runs.
        """
        wanted = [one for one in candidates if one.name in references or self._wanted(one.name)]
        calls, reasons = ready(wanted)
        running = [name for name in references if name in calls]
        reference = running[0] if running else None
        timings = interleaved(calls, reference, self.options)
        memory = {} if self.options.no_memory else _memory(wanted, calls)
        if dtype not in self.peaks:
            self.peaks[dtype] = peaks(self.options.device, getattr(torch, dtype))
        rows = []
        for one in wanted:
            row = asdict(one)
            row["candidate"] = one.name
            row["reason"] = reasons.get(one.name)
            row["flops"] = one.flops
            row["bytes"] = one.bytes
            row["peak_bytes"] = memory.get(one.name)
            row["reference"] = reference
            row |= summary(timings.get(one.name, []), timings.get(reference or "", []))
            row |= floor(one, self.peaks[dtype], row["median_ms"])
            rows.append(row)
        self.rows += rows
        return rows

    def _wanted(self, name: str) -> bool:
        words = self.options.only
        return not words or any(word in name for word in words)

    def save(self, markdown: str) -> None:
        """Write what is known so far; an interrupted run leaves whole files."""
        output = self.options.output
        if not output:
            return
        record = {
            "title": self.title,
            "conditions": self.conditions,
            "peaks": self.peaks,
            "rows": self.rows,
        }
        write_text(output, json.dumps(record) + "\n")
        write_text(output.with_suffix(".md"), markdown + "\n")


def ready(candidates: Sequence[Any]) -> tuple[dict[str, Call], dict[str, str]]:
    """What each candidate runs, called once, and why the others do not run, by name.

    All inputs exist before the first call: what fits once fits in every round.
    """
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for one in candidates:
        if one.needs > available(one.device):
            reasons[one.name] = f"not run: needs {one.needs / 2**30:.1f} GiB"
            continue
        try:
            calls[one.name] = one.prepare()
        except Exception as fault:
            reasons[one.name] = _reason(fault)
    for name, call in list(calls.items()):
        try:
            call()
        except Exception as fault:
            reasons[name] = _reason(fault)
            del calls[name]
    return calls, reasons


def _reason(fault: Exception) -> str:
    """One line on why a candidate does not run."""
    kind = "not run" if isinstance(fault, UserError) else f"failed: {type(fault).__name__}"
    message = str(fault) or "no message"
    return f"{kind}: {message.splitlines()[0]}"


def interleaved(
    calls: dict[str, Call], reference: str | None, options: argparse.Namespace
) -> dict[str, list[Timing]]:
    """One timing for each round that a candidate took part in, by name.

    The reference takes part as long as anybody does.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in calls}
    spent: dict[str, float] = {}
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        seconds = clocked(call, 1, options.device)["ms"] / 1000
        spent[name] = seconds
        repeats[name] = max(1, min(100, round(SHORTEST / max(seconds, 1e-6))))
    live = list(calls)
    for number in range(options.rounds):
        for name in _rotated(live, number):
            timing = clocked(calls[name], repeats[name], options.device)
            timings[name].append(timing)
            spent[name] += timing["ms"] * repeats[name] / 1000
        unspent = [name for name in live if spent[name] < options.seconds]
        live = _with_reference(unspent, reference)
    return timings


def _rotated(names: list[str], number: int) -> list[str]:
    """The same names, beginning with another one in each round."""
    if not names:
        return []
    first = number % len(names)
    return names[first:] + names[:first]


def _with_reference(names: list[str], reference: str | None) -> list[str]:
    if not names or reference is None:
        return names
    return [reference, *(name for name in names if name != reference)]


def clocked(call: Call, repeats: int, device: str) -> Timing:
    """Milliseconds of one call, the mean of `repeats`.

    ms is CPU time of all threads, on CUDA the time between two events; wall_ms is the clock's.
    """
    measure = _events if device == "cuda" else _cpu_time
    start = time.perf_counter()
    busy = measure(call, repeats)
    wall = (time.perf_counter() - start) * 1000
    return {"ms": busy / repeats, "wall_ms": wall / repeats}


def _events(call: Call, repeats: int) -> float:
    """Milliseconds between two CUDA events around the calls."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _cpu_time(call: Call, repeats: int) -> float:
    """Milliseconds of CPU time of all threads."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) * 1000


def summary(timings: list[Timing], reference: list[Timing]) -> dict[str, Any]:
    """Times and ratios to the reference in the same round, with their medians and quartiles."""
    times = [timing["ms"] for timing in timings]
    reference_times = [timing["ms"] for timing in reference]
    pairs = zip(times, reference_times, strict=False)
    ratios = [mine / theirs for mine, theirs in pairs]
    return {
        "ms": times,
        "wall_ms": [timing["wall_ms"] for timing in timings],
        "median_ms": statistics.median(times) if times else None,
        "quartiles_ms": quartiles(times),
        "ratio": statistics.median(ratios) if ratios else None,
        "quartiles_ratio": quartiles(ratios),
    }


def quartiles(numbers: list[float]) -> list[float] | None:
    """The first and the third, or the number itself where there is one."""
    if len(numbers) < 2:
        return [*numbers, *numbers] or None
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return [first, third]


def _memory(candidates: Sequence[Any], calls: dict[str, Call]) -> dict[str, int | None]:
    memory = {}
    for one in candidates:
        if one.name in calls:
            memory[one.name] = peak(one, calls[one.name])
    return memory


def peak(candidate: Any, call: Call) -> int | None:
    """Bytes that one call takes beyond its inputs; None where there was not enough memory."""
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
    short = replace(candidate, length=min(WARM_LENGTH, candidate.length))
    short.prepare()()
    call = candidate.prepare()
    with contextlib.suppress(OSError):  # Linux: the peak so far is forgotten
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident_peak()
    call()
    return _resident_peak() - before


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available(device: str) -> float:
    """Bytes of memory that are free; unlimited where the system does not say."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        unused_by_torch = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused_by_torch
    if not os.path.exists(MEMORY):
        return float("inf")
    for line in Path(MEMORY).read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return float("inf")


def peaks(device: str, dtype: torch.dtype) -> dict[str, float]:
    """What this machine does at best, measured.

    flops_per_second: of matrix products; bytes_per_second: of copies, read and written.
    On the CPU they are per second of CPU time, as candidates are timed.
    """
    cuda = device == "cuda"
    size = 4096 if cuda else 1024
    count = 2**29 if cuda else 2**26
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "flops_per_second": 2 * size**3 / _median_seconds(lambda: a @ b, device),
        "bytes_per_second": 2 * count / _median_seconds(lambda: target.copy_(source), device),
    }


def _median_seconds(call: Call, device: str) -> float:
    clocked(call, 3, device)  # to warm up
    times = [clocked(call, 3, device)["ms"] for _ in range(5)]
    return statistics.median(times) / 1000


def floor(
    candidate: Any, best: dict[str, float], median_ms: float | None
) -> dict[str, float | None]:
    """The time below which this machine cannot do the work, and how many times that was taken."""
    computing = candidate.flops / best["flops_per_second"]
    moving = candidate.bytes / best["bytes_per_second"]
    floor_ms = max(computing, moving) * 1000
    times_floor = None if median_ms is None else median_ms / floor_ms
    return {"floor_ms": floor_ms, "times_floor": times_floor}


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    if options.device == "cuda":
        hardware = torch.cuda.get_device_name()
        clock = "CUDA events"
    else:
        hardware = f"{processor()}, {os.cpu_count()} cores"
        clock = "CPU time of all threads"
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware,
        "clock": clock,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()


def report_progress(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)
