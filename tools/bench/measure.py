"""What the benchmarks share: interleaved timing, peak memory, floors, and results in JSON and Markdown."""

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

SHORTEST = 0.02  # seconds that one measurement lasts at least, by repeating the call
WARM_LENGTH = (
    64  # what a process does once before its memory is measured, so that libraries are loaded
)
MEMORY = "/proc/meminfo"
DTYPES = ("float32", "bfloat16", "float16")


def arguments(description: str, quick: dict[str, Any]) -> argparse.ArgumentParser:
    """The options that the benchmarks share; `quick` is what --quick sets where an option is not given."""
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
    add(
        "--quick",
        action="store_true",
        help=f"a run of minutes: {', '.join(f'{k}={v}' for k, v in quick.items())}",
    )
    return parser


def parsed(
    parser: argparse.ArgumentParser, quick: dict[str, Any], argv: Sequence[str] | None
) -> argparse.Namespace:
    """The options, checked; UserError where the output cannot be written."""
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(**quick)
    given = parser.parse_args(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch sees no CUDA device; use --device cpu")
    if given.output and (given.output.suffix != ".json" or not given.output.parent.is_dir()):
        raise UserError(
            f"--output: {given.output} must end in .json and lie in a folder that exists"
        )
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class Bench:
    """Runs groups of candidates and keeps their rows.

    A candidate is a frozen dataclass with `length` and `device`, a property `name`, prepare() -> the call to be timed,
    and flops, bytes (what the work surely takes) and needs (bytes of memory without which it cannot run). Its fields
    begin its row.
    """

    def __init__(self, given: argparse.Namespace, title: str) -> None:
        self.given, self.title, self.rows, self.peaks = given, title, [], {}
        self.conditions = conditions(given)

    def group(
        self, candidates: Sequence[Any], references: Sequence[str], dtype: str
    ) -> list[dict[str, Any]]:
        """Measure candidates against each other: one row each; ratios are to the first of `references` that runs."""
        wanted = [one for one in candidates if self._wanted(one.name) or one.name in references]
        calls, reasons = ready(wanted)
        reference = next((name for name in references if name in calls), None)
        timings = interleaved(calls, reference, self.given)
        measured = [] if self.given.no_memory else [one for one in wanted if one.name in calls]
        memory = {one.name: peak(one, calls[one.name]) for one in measured}
        if dtype not in self.peaks:
            self.peaks[dtype] = peaks(self.given.device, getattr(torch, dtype))
        rows = []
        for one in wanted:
            row = asdict(one) | {
                "candidate": one.name,
                "reason": reasons.get(one.name),
                "flops": one.flops,
            }
            row |= {"bytes": one.bytes, "peak_bytes": memory.get(one.name), "reference": reference}
            row |= summary(timings.get(one.name, []), timings.get(reference, []))
            rows.append(row | floor(one, self.peaks[dtype], row["median_ms"]))
        self.rows += rows
        return rows

    def _wanted(self, name: str) -> bool:
        return not self.given.only or any(word in name for word in self.given.only)

    def save(self, markdown: str) -> None:
        """Write what is known so far, beside and renamed, so that an interrupted run leaves whole files."""
        if self.given.output:
            found = {
                "title": self.title,
                "conditions": self.conditions,
                "peaks": self.peaks,
                "rows": self.rows,
            }
            texts = {
                self.given.output: json.dumps(found),
                self.given.output.with_suffix(".md"): markdown,
            }
            for path, text in texts.items():
                fresh = path.with_name(path.name + ".partial")
                fresh.write_text(text + "\n", encoding="utf-8")
                fresh.replace(path)


def ready(candidates: Sequence[Any]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What each candidate runs, called once, and why the others do not run, by name.

    All inputs exist before the first call: what fits once fits in every round.
    """
    calls: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}

    def attempted(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as fault:
            kind = "not run" if isinstance(fault, UserError) else f"failed: {type(fault).__name__}"
            reasons[name] = f"{kind}: {(str(fault) or 'no message').splitlines()[0]}"

    for one in candidates:
        if one.needs > available(one.device):
            reasons[one.name] = f"not run: needs {one.needs / 2**30:.1f} GiB"
        else:
            calls[one.name] = attempted(one.name, one.prepare)
    for name in list(calls):
        if name not in reasons:
            attempted(name, calls[name])
        if name in reasons:
            del calls[name]
    return calls, reasons


def interleaved(
    calls: dict[str, Callable[[], Any]], reference: str | None, given: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """One timing for each round that a candidate took part in, by name; the reference takes part in all."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    spent, repeats = {}, {}
    for name, call in calls.items():
        seconds = clocked(call, 1, given.device)["ms"] / 1000
        spent[name], repeats[name] = seconds, max(1, min(100, round(SHORTEST / max(seconds, 1e-6))))
    live = list(calls)
    for number in range(given.rounds):
        order = live[number % len(live) :] + live[: number % len(live)] if live else []
        for name in order:
            found[name].append(clocked(calls[name], repeats[name], given.device))
            spent[name] += found[name][-1]["ms"] * repeats[name] / 1000
        live = [name for name in live if spent[name] < given.seconds]
        live = (
            [reference, *(name for name in live if name != reference)]
            if reference and live
            else live
        )
    return found


def clocked(call: Callable[[], Any], repeats: int, device: str) -> dict[str, float]:
    """Milliseconds of one call, the mean of `repeats`: ms is CPU time of all threads, on CUDA time between events."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        wall = time.perf_counter()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        busy = start.elapsed_time(end)
    else:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        busy = (time.process_time() - cpu) * 1000
    return {"ms": busy / repeats, "wall_ms": (time.perf_counter() - wall) * 1000 / repeats}


def summary(timings: list[dict[str, float]], reference: list[dict[str, float]]) -> dict[str, Any]:
    """Every round's time and its ratio to the reference's time of the same round; medians and quartiles of both."""
    times, others = [one["ms"] for one in timings], [one["ms"] for one in reference]
    ratios = [mine / theirs for mine, theirs in zip(times, others, strict=False)]
    return {
        "ms": times,
        "wall_ms": [one["wall_ms"] for one in timings],
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


def peak(candidate: Any, call: Callable[[], Any]) -> int | None:
    """Bytes that one call takes beyond its inputs; None where they were not to be had."""
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
    replace(candidate, length=min(WARM_LENGTH, candidate.length)).prepare()()
    call = candidate.prepare()
    with contextlib.suppress(OSError):  # Linux: the peak so far is forgotten
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def available(device: str) -> float:
    """Bytes of memory that are free; unlimited where the system does not say."""
    if device == "cuda":
        return (
            torch.cuda.mem_get_info()[0]
            + torch.cuda.memory_reserved()
            - torch.cuda.memory_allocated()
        )
    if not os.path.exists(MEMORY):
        return float("inf")
    found = dict(line.split(":") for line in Path(MEMORY).read_text().splitlines())
    return int(found["MemAvailable"].split()[0]) * 1024


def peaks(device: str, dtype: torch.dtype) -> dict[str, float]:
    """What this machine does at best, measured: matrix products (flops per second), copies (bytes per second, read and
    written); on CPU per second of CPU time, as candidates are timed."""
    size, count = (4096, 2**29) if device == "cuda" else (1024, 2**26)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def best(call: Callable[[], Any]) -> float:
        clocked(call, 3, device)
        return statistics.median(clocked(call, 3, device)["ms"] for _ in range(5)) / 1000

    return {
        "flops_per_second": 2 * size**3 / best(lambda: a @ b),
        "bytes_per_second": 2 * count / best(lambda: target.copy_(source)),
    }


def floor(
    candidate: Any, best: dict[str, float], median_ms: float | None
) -> dict[str, float | None]:
    """The time below which this machine cannot do the work, and how many times that was taken."""
    seconds = max(
        candidate.flops / best["flops_per_second"], candidate.bytes / best["bytes_per_second"]
    )
    return {
        "floor_ms": seconds * 1000,
        "times_floor": median_ms / (seconds * 1000) if median_ms is not None else None,
    }


def conditions(given: argparse.Namespace) -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    cuda = given.device == "cuda"
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name()
        if cuda
        else f"{processor()}, {os.cpu_count()} cores",
        "clock": "CUDA events" if cuda else "CPU time of all threads",
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


def heading(bench: Bench) -> str:
    """Title and conditions in Markdown."""
    facts = bench.conditions
    said = [
        facts["hardware"],
        f"torch {facts['torch']}",
        f"threads {facts['threads']}",
        facts["clock"],
    ]
    said += [f"commit {facts['commit']}", facts["date"][:10]]
    best = [
        f"{dtype} {found['flops_per_second'] / 1e9:,.0f} GFLOP/s in matrix products"
        f" and {found['bytes_per_second'] / 1e9:,.0f} GB/s in copies"
        for dtype, found in bench.peaks.items()
    ]
    return f"`{facts['command']}`  \n{', '.join(said)}  \nmeasured peaks: {'; '.join(best)}\n"


def figures(row: dict[str, Any]) -> list[str]:
    """A row's times and what they are compared with, for a table with the columns FIGURES."""
    if row["median_ms"] is None:
        return ["-", "-", "-", shown(row["floor_ms"]), "-"]
    spent = shown(row["median_ms"]) + spread(row["quartiles_ms"])
    ratio = "-" if row["ratio"] is None else shown(row["ratio"]) + spread(row["quartiles_ratio"])
    megabytes = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
    return [spent, ratio, megabytes, shown(row["floor_ms"]), f"{row['times_floor']:.1f}"]


FIGURES = ["ms (quartiles)", "ratio (quartiles)", "peak MiB", "floor ms", "x floor"]


def shown(number: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def spread(ends: list[float]) -> str:
    return f" ({shown(ends[0])}-{shown(ends[1])})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    cells = [[cell.replace("|", "/") for cell in row] for row in [header, *rows]]
    lines = [cells[0], ["---", *["---:"] * (len(header) - 1)], *cells[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def told(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)
