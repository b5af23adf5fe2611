"""Many runs from one file: encodings x corpora x seeds x sizes, trained, evaluated, collected.

python tools/sweep.py run configs/sweeps/cpu.yml --dry-run   the plan and what it costs
python tools/sweep.py run kerple-table3 --dry-run --device a100 --jobs 8   on eight A100
python tools/sweep.py run configs/sweeps/cpu.yml             do what is missing; it may be repeated
python tools/sweep.py status configs/sweeps/cpu.yml
python tools/sweep.py collect configs/sweeps/cpu.yml         results.jsonl of what is done
"""

import argparse
import collections
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.evaluation.options import number
from megatron.sweeps.cells import (
    State,
    Sweep,
    absent_data,
    collect,
    described,
    described_faults,
    load_sweep,
    state_of,
    unfinished,
)
from megatron.sweeps.cost import DEVICES, UTILISATION, cost, named_device, this_device
from megatron.sweeps.runner import Runner, places_of, write_slurm_script


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("run", "status", "collect"))
    add("file", help="a file as in configs/sweeps, or the name of one there")
    add("--folder", type=Path, metavar="DIR", help="where the runs are; default: runs/sweeps/NAME")
    only = "some cells of the grid"
    add("--only", nargs="+", default=[], metavar="AXIS=VALUE[,VALUE]", help=only)
    add("--dry-run", action="store_true", help="say what run would do, and its cost")
    jobs = "runs at a time; default: one per GPU, or one"
    add("--jobs", type=number(1, 10**4), metavar="N", help=jobs)
    devices = f"give the cost for another device: cpu, {', '.join(DEVICES)}"
    add("--device", metavar="NAME", help=devices)
    keep = "keep the optimizer's states of finished cells (four times the disk), to train on"
    add("--keep-states", action="store_true", help=keep)
    add("--launcher", choices=("local", "slurm"), default="local")
    words = "--sbatch=--partition=x: for Slurm"
    add("--sbatch", action="append", default=[], metavar="WORD", help=words)
    options = parser.parse_args(argv)

    if options.what == "collect":
        whole = load_sweep(options.file, options.folder)
        rows = collect(whole)
        if not rows:
            raise UserError(
                f"{whole.folder}: no cell of {whole.name} is finished, so there is nothing to"
                " collect - see status; --folder names another place"
            )
        print(f"{len(rows)} rows in {whole.results}")
        missing = len(unfinished(whole))
        if missing:
            print(f"{missing} of {len(whole.cells)} cells are missing: see status")
        return 0

    sweep = load_sweep(options.file, options.folder, options.only)
    if options.keep_states:
        sweep = replace(sweep, keep_states=True)
    states = [state_of(cell) for cell in sweep.cells]
    if options.what == "status":
        print("\n".join(status(sweep, states)))
        bad = any(state.kind in ("failed", "foreign", "damaged") for state in states)
        return int(bad or bool(sweep.broken))
    print(plan(sweep, states, options.jobs, options.device), flush=True)
    several = len(sweep.broken) + len(sweep.cells)
    if sweep.broken:
        show(
            f"{len(sweep.broken)} of {several} cells cannot be run:", described_faults(sweep.broken)
        )
    if options.dry_run or all(state.kind == "done" for state in states):
        return int(bool(sweep.broken))
    if options.launcher == "slurm":
        return max(submit(sweep, options.sbatch), int(bool(sweep.broken)))

    runner = Runner(places_of(options.jobs), lambda text: print(text, flush=True))
    runner.run(sweep)
    # Of all cells, not of those of --only: rows of the others must stay.
    rows = collect(load_sweep(options.file, options.folder))
    print(f"{len(rows)} rows in {sweep.results}")
    missing = [f"{cell.name}: {described(cell, state)}" for cell, state in unfinished(sweep)]
    missing += [f"{name}: its configuration is bad, see above" for name in sweep.broken]
    if missing:
        show(f"{len(missing)} of {several} cells are missing:", missing)
    if runner.stopping:
        return 130
    return int(bool(missing or runner.failed))


def show(title: str, lines: Sequence[str]) -> None:
    """Print indented lines to stderr."""
    print("\n  ".join([title, *lines]), file=sys.stderr)


def submit(sweep: Sweep, options: Sequence[str]) -> int:
    """Hand the missing cells to Slurm, or say where their script is."""
    missing = [cell for cell, _ in unfinished(sweep)]
    script = write_slurm_script(sweep, missing, options)
    if shutil.which("sbatch") is None:
        jobs = f"the array of {len(missing)} jobs is in {script}"
        print(f"sbatch is not on this machine; {jobs}: sbatch {script}")
        return 0
    return subprocess.run(["sbatch", str(script)], check=False).returncode


def status(sweep: Sweep, states: Sequence[State]) -> list[str]:
    """A line for the sweep and one for each cell."""
    counts = collections.Counter(state.kind for state in states)
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines = [f"{sweep.name}: {len(sweep.cells)} cells, {counted}; runs in {sweep.folder}"]
    width = max(len(cell.name) for cell in sweep.cells)
    for cell, state in zip(sweep.cells, states, strict=True):
        lines.append(f"{cell.name:<{width}}  {described(cell, state)}")
    for name, fault in sweep.broken.items():
        lines.append(f"{name:<{width}}  cannot be run: {' '.join(fault.split())}")
    return lines


def plan(
    sweep: Sweep, states: Sequence[State], jobs: int | None, device_name: str | None = None
) -> str:
    """What will be done and what it costs."""
    precision = sweep.cells[0].config.precision.dtype
    if device_name is None:
        device = this_device(precision)
        count = len(set(places_of(jobs)))  # runs on one device share its speed
    else:
        device = named_device(device_name, precision)
        count = 1 if device_name == "cpu" else (jobs or 1)
    price = cost(sweep, states, device, max(count, jobs or 1))
    speed = f"{device.flops_per_second / 1e12:.3g} TFLOP/s, {device.basis}"
    folder = sweep.folder.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    warning = "" if price.disk < free else " - NOT ENOUGH"
    kept = "optimizer's states" if sweep.keep_states else "weights only"
    needed = f"{price.disk / 1e9:,.1f} GB (finished cells keep {kept})"
    lines = [
        status(sweep, states)[0],
        f"to do: {price.tokens / 1e6:,.1f} million tokens of training, "
        f"{price.flops:.2e} FLOP with evaluation",
        f"time: {duration(price.seconds / count)} on {count} x {device.name} "
        f"(assumed: {UTILISATION:.0%} of {speed})",
        f"disk: needs {needed}, {free / 1e9:,.0f} GB are free{warning}",
    ]
    lines += [f"data are absent: {path} (prepare_data.py)" for path in absent_data(sweep)]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """In the unit in which it has one to three digits: 40 seconds, 12 minutes, 3.4 hours."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:,.1f} hours"


if __name__ == "__main__":
    sys.exit(main())
