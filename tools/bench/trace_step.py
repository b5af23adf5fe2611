"""What the device does during one training step, and how long it waits for the host.

python tools/bench/trace_step.py --encoding kerple_log --output trace.json

Writes the figures to FILE.json, and to FILE.trace.json.gz what chrome://tracing and Perfetto show.
The step is that of step.py. The profiler's own work lies between the kernels, too, so the idle time
is an upper bound. On the CPU its own operations stand for the device's.
"""

import argparse
import gzip
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_tables import shown, table
from measure import DTYPES, conditions, positive
from step import Candidate
from torch.profiler import ProfilerActivity, profile

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.files import write_text

LONGEST_SHOWN = 12  # kernels and gaps of a table
Interval = tuple[float, float]  # begin and end in microseconds


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    add("--encoding", default="kerple_log", metavar="NAME")
    add("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    add("--batch", type=positive, default=32, help="windows of a step")
    add("--length", type=positive, default=512, metavar="L")
    for name, size in (("hidden", 768), ("layers", 12), ("heads", 12), ("vocab", 50304)):
        add(f"--{name}", type=positive, default=size, help="default: 125M's")
    add("--output", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args(argv)
    found = traced(options)
    record = {"conditions": conditions(options), **found}
    write_text(options.output, json.dumps(record) + "\n")
    write_text(options.output.with_suffix(".md"), markdown(found) + "\n")
    print(markdown(found))
    return 0


def traced(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one step, after some that are not looked at."""
    step = Candidate(
        pos_emb=options.encoding,
        backend="auto",
        training=True,
        length=options.length,
        batch=options.batch,
        dtype=options.dtype,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        vocab=options.vocab,
        train_length=options.length,
        device=options.device,
    ).prepare()
    on_gpu = options.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(3):
        step()
    for _ in range(2):  # the first is spent on starting the device's own profiler
        if on_gpu:
            torch.cuda.synchronize()
        with profile(activities=activities) as profiler:
            step()
            if on_gpu:
                torch.cuda.synchronize()
    save_trace(profiler, options.output.with_suffix(".trace.json.gz"))
    return figures(operations(profiler, options.device))


def operations(profiler: profile, device: str) -> list[tuple[str, Interval]]:
    """Name and interval of all that ran on a device; on the CPU, of what no other one called."""
    found = []
    for event in profiler.events() or []:
        if event.device_type.name != device.upper():
            continue
        inside = event.cpu_parent is not None
        spans_others = device == "cuda" and event.is_user_annotation
        if not inside and not spans_others:
            found.append((event.name, (event.time_range.start, event.time_range.end)))
    return found


def save_trace(profiler: profile, path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name, "trace.json")
        profiler.export_chrome_trace(str(plain))
        path.write_bytes(gzip.compress(plain.read_bytes()))


def figures(work: Sequence[tuple[str, Interval]]) -> dict[str, Any]:
    """What a device did in one step, from the name and interval of each of its operations.

    UserError without operations.
    """
    if not work:
        raise UserError("the profiler saw no kernel; is another profiler running?")
    times: dict[str, float] = defaultdict(float)
    for name, (begin, end) in work:
        times[name] += (end - begin) / 1000
    longest = sorted(times.items(), key=lambda item: -item[1])
    waits = gaps([interval for _, interval in work])
    begin = min(interval[0] for _, interval in work)
    end = max(interval[1] for _, interval in work)
    span = (end - begin) / 1000
    idle = sum(waits)
    return {
        "span_ms": span,
        "idle_ms": idle,
        "idle_share": idle / span,
        "operations": len(work),
        "gaps_ms": sorted(waits, reverse=True)[:LONGEST_SHOWN],
        "kernels_ms": dict(longest),
    }


def gaps(intervals: Sequence[Interval]) -> list[float]:
    """Milliseconds in which nothing ran, between the first begin and the last end."""
    found = []
    busy_until = None
    for begin, end in sorted(intervals):
        if busy_until is None:
            busy_until = end
            continue
        if begin > busy_until:
            found.append((begin - busy_until) / 1000)
        busy_until = max(busy_until, end)
    return found


def markdown(found: dict[str, Any]) -> str:
    """The step in one line, then its longest kernels."""
    share = 100 * found["idle_share"]
    line = (
        f"{shown(found['span_ms'])} ms, of which at most {shown(found['idle_ms'])} ms idle "
        f"({share:.0f} %), {found['operations']} operations\n"
    )
    lines = []
    for name, spent in list(found["kernels_ms"].items())[:LONGEST_SHOWN]:
        lines.append([name, shown(spent), f"{100 * spent / found['span_ms']:.0f}"])
    return line + "\n" + table(["kernel", "ms", "%"], lines)


if __name__ == "__main__":
    sys.exit(main())
