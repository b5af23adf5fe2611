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
from megatron.sweeps.cost import DEVICES, UTILISATION, Cost, Device, cost, named_device, this_device
from megatron.sweeps.runner import Runner, places_of, write_slurm_script


@guarded
def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.what == "collect":
        return _collect(options)
    sweep = load_sweep(options.file, options.folder, options.only)
    if options.keep_states:
        sweep = replace(sweep, keep_states=True)
    states = [state_of(cell) for cell in sweep.cells]
    if options.what == "status":
        print(status(sweep, states))
        bad = any(state.kind in ("failed", "foreign", "damaged") for state in states)
        return int(bad or bool(sweep.broken))
    print(plan(sweep, states, options.jobs, options.device), flush=True)
    print_broken(sweep)
    if options.dry_run or all(state.kind == "done" for state in states):
        return int(bool(sweep.broken))
    if options.launcher == "slurm":
        return _submit(sweep, options.sbatch)
    return _run(sweep, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("run", "status", "collect"))
    add("file", help="a file as in configs/sweeps, or the name of one there")
    add("--folder", type=Path, metavar="DIR", help="where the runs are; default: runs/sweeps/NAME")
    add(
        "--only", nargs="+", default=[], metavar="AXIS=VALUE[,VALUE]", help="some cells of the grid"
    )
    add("--dry-run", action="store_true", help="say what run would do, and its cost")
    add("--jobs", type=_count, metavar="N", help="runs at a time; default: one per GPU, or one")
    devices = ", ".join(DEVICES)
    add("--device", metavar="NAME", help=f"give the cost for another device: cpu, {devices}")
    add(
        "--keep-states",
        action="store_true",
        help="keep the optimizer's states of finished cells (four times the disk), to train on",
    )
    add("--launcher", choices=("local", "slurm"), default="local")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="WORD",
        help="--sbatch=--partition=x: for Slurm",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number of runs: give 1 or more")
    return int(text)


def plan(
    sweep: Sweep, states: Sequence[State], jobs: int | None, device_name: str | None = None
) -> str:
    """What will be done and what it costs."""
    places = places_of(jobs)
    precision = sweep.cells[0].config.precision.dtype
    if device_name is None:
        device = this_device(precision)
        count = len(set(places))  # runs on one device share its speed
    else:
        device = named_device(device_name, precision)
        count = 1 if device_name == "cpu" else (jobs or 1)
    price = cost(sweep, states, device, max(count, jobs or 1))
    lines = [
        f"{sweep.name}: {len(sweep.cells)} cells, {_counted(states)}; runs in {sweep.folder}",
        f"to do: {price.tokens / 1e6:,.1f} million tokens of training, "
        f"{price.flops:.2e} FLOP with evaluation",
        f"time: {duration(price.seconds / count)} on {count} x {device.name} "
        f"({_basis(price, device)})",
        _disk(sweep, price),
    ]
    lines += [f"data are absent: {path} (prepare_data.py)" for path in absent_data(sweep)]
    return "\n".join(lines)


def _basis(price: Cost, device: Device) -> str:
    if price.measured:
        return "as fast as this sweep's runs were"
    speed = f"{device.flops_per_second / 1e12:.3g} TFLOP/s"
    return f"assumed: {UTILISATION:.0%} of {speed}, {device.basis}"


def _disk(sweep: Sweep, price: Cost) -> str:
    folder = sweep.folder.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    warning = "" if price.disk < free else " - NOT ENOUGH"
    kept = "optimizer's states" if sweep.keep_states else "weights only"
    needed = f"{price.disk / 1e9:,.1f} GB (finished cells keep {kept})"
    return f"disk: needs {needed}, {free / 1e9:,.0f} GB are free{warning}"


def duration(seconds: float) -> str:
    """In the unit in which it has one to three digits: 40 seconds, 12 minutes, 3.4 hours."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:,.1f} hours"


def status(sweep: Sweep, states: Sequence[State]) -> str:
    """One line for each cell."""
    width = max(len(cell.name) for cell in sweep.cells)
    lines = [f"{sweep.name}: {len(sweep.cells)} cells, {_counted(states)}; runs in {sweep.folder}"]
    for cell, state in zip(sweep.cells, states, strict=True):
        lines.append(f"{cell.name:<{width}}  {described(cell, state)}")
    for name, fault in sweep.broken.items():
        lines.append(f"{name:<{width}}  cannot be run: {' '.join(fault.split())}")
    return "\n".join(lines)


def print_broken(sweep: Sweep) -> None:
    """Print to stderr which cells have a bad configuration; the others run all the same."""
    if not sweep.broken:
        return
    count = len(sweep.broken) + len(sweep.cells)
    print(f"{len(sweep.broken)} of {count} cells cannot be run:", file=sys.stderr)
    for line in described_faults(sweep.broken):
        print(f"  {line}", file=sys.stderr)


def _counted(states: Sequence[State]) -> str:
    counts = collections.Counter(state.kind for state in states)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _run(sweep: Sweep, options: argparse.Namespace) -> int:
    """Do what is missing. Returns 1 where cells are missing or broken, 130 after a signal."""
    runner = Runner(places_of(options.jobs), lambda text: print(text, flush=True))
    runner.run(sweep)
    # All cells, not some of --only: rows of the others must stay.
    whole = load_sweep(options.file, options.folder)
    print(f"{len(collect(whole))} rows in {sweep.results}")
    missing = [f"{cell.name}: {described(cell, state)}" for cell, state in unfinished(sweep)]
    missing += [f"{name}: its configuration is bad, see above" for name in sweep.broken]
    if missing:
        count = len(sweep.cells) + len(sweep.broken)
        print(f"{len(missing)} of {count} cells are missing:", file=sys.stderr)
    for line in missing:
        print(f"  {line}", file=sys.stderr)
    if runner.stopping:
        return 130
    return int(bool(missing or runner.failed))


def _submit(sweep: Sweep, options: Sequence[str]) -> int:
    missing = [cell for cell, _ in unfinished(sweep)]
    broken = int(bool(sweep.broken))
    script = write_slurm_script(sweep, missing, options)
    if shutil.which("sbatch") is None:
        jobs = f"the array of {len(missing)} jobs is in {script}"
        print(f"sbatch is not on this machine; {jobs}: sbatch {script}")
        return broken
    return subprocess.run(["sbatch", str(script)], check=False).returncode or broken


def _collect(options: argparse.Namespace) -> int:
    """Write results.jsonl of the whole sweep, whatever --only says."""
    sweep = load_sweep(options.file, options.folder)
    rows = collect(sweep)
    if not rows:
        raise UserError(
            f"{sweep.folder}: no cell of {sweep.name} is finished, so there is nothing to collect"
            " - see status; --folder names another place"
        )
    missing = len(unfinished(sweep))
    print(f"{len(rows)} rows in {sweep.results}")
    if missing:
        print(f"{missing} of {len(sweep.cells)} cells are missing: see status")
    return 0


if __name__ == "__main__":
    sys.exit(main())
