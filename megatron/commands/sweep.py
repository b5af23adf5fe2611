"""Many runs from one file: encodings x corpora x seeds x sizes, trained, evaluated, collected in one results.jsonl.

python tools/sweep.py run configs/sweeps/cpu.yml --dry-run     the plan and what it costs
python tools/sweep.py run configs/sweeps/cpu.yml               does what is missing; interrupted, it continues
python tools/sweep.py status configs/sweeps/cpu.yml
python tools/sweep.py collect configs/sweeps/cpu.yml           results.jsonl of what is done
"""

import argparse
import collections
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from megatron.errors import UserError
from megatron.sweeps.cost import cost, speed_of
from megatron.sweeps.plan import Sweep, load_sweep
from megatron.sweeps.run import Runner
from megatron.sweeps.slurm import write_script
from megatron.sweeps.state import State, collect, state_of


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        sweep = load_sweep(
            options.file, options.folder, options.only if options.what != "collect" else ()
        )
        if options.what == "collect":
            print(f"{len(collect(sweep))} rows in {sweep.results}")
            return 0
        states = [state_of(cell) for cell in sweep.cells]
        if options.what == "status":
            print(status(sweep, states))
            return int(any(state.kind in ("failed", "foreign") for state in states))
        print(plan(sweep, states, options.jobs), flush=True)
        if options.dry_run or all(state.kind == "done" for state in states):
            return 0
        return (
            submit(sweep, states, options) if options.launcher == "slurm" else run(sweep, options)
        )
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "status", "collect"))
    parser.add_argument("file", type=Path, help="a file as in configs/sweeps")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the runs are; default: runs/sweeps/NAME"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="AXIS=VALUE[,VALUE]", help="some cells of the grid"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what run would do, and its cost"
    )
    parser.add_argument(
        "--jobs", type=_count, metavar="N", help="runs at a time; default: one per GPU, or one"
    )
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local")
    parser.add_argument(
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


def places(jobs: int | None) -> list[str | None]:
    """One per GPU, or per job."""
    gpus = torch.cuda.device_count()
    own = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or list(
        map(str, range(gpus))
    )
    return [own[place % gpus] if gpus else None for place in range(jobs or gpus or 1)]


def plan(sweep: Sweep, states: list[State], jobs: int | None) -> str:
    """What will be done and what it costs."""
    gpu = torch.cuda.is_available()
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = kinds[sweep.cells[0].config.precision.dtype] if gpu else torch.float32
    flops = speed_of(torch.device("cuda" if gpu else "cpu"), dtype)
    asked, count = (
        cost(sweep, states, flops),
        len(set(places(jobs))),
    )  # runs on one device share its speed
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    basis = (
        "as fast as this sweep's runs were"
        if asked.measured
        else f"assumed: 35 % of {flops / 1e12:.2g} TFLOP/s"
    )
    folder = sweep.folder.resolve()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    lines = [
        f"{sweep.name}: {len(sweep.cells)} cells, {_counted(states)}; runs in {sweep.folder}",
        f"to do: {asked.tokens / 1e6:,.1f} million tokens of training, {asked.flops:.2e} FLOP with evaluation",
        f"time: {asked.seconds / 3600 / count:,.1f} hours on {count} x {device} ({basis})",
        f"disk: {asked.disk / 1e9:,.1f} GB of {free / 1e9:,.0f} GB free"
        + ("" if asked.disk < free else " - NOT ENOUGH"),
    ]
    absent = sorted(
        {
            path
            for cell in sweep.cells
            if not Path(f"{(path := cell.config.data.data_path)}.idx").exists()
        }
    )
    return "\n".join(
        [*lines, *(f"data are not there: {path} (prepare_data.py)" for path in absent)]
    )


def status(sweep: Sweep, states: list[State]) -> str:
    width = max(len(cell.name) for cell in sweep.cells)
    lines = [f"{sweep.name}: {len(sweep.cells)} cells, {_counted(states)}; runs in {sweep.folder}"]
    for cell, state in zip(sweep.cells, states, strict=True):
        steps = f"step {state.step}/{cell.steps}"
        lines.append(f"{cell.name:<{width}}  {state.kind:<10}  {steps}  {state.note}".rstrip())
    return "\n".join(lines)


def _counted(states: list[State]) -> str:
    counts = collections.Counter(state.kind for state in states)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def run(sweep: Sweep, options: argparse.Namespace) -> int:
    runner = Runner(places(options.jobs), lambda text: print(text, flush=True))
    runner.run(sweep)
    whole = load_sweep(
        options.file, options.folder
    )  # a part of the cells must not replace the rows of the others
    print(f"{len(collect(whole))} rows in {sweep.results}")
    if runner.failed:
        print(f"failed: {', '.join(runner.failed)}", file=sys.stderr)
    return int(bool(runner.failed)) or (130 if runner.stopping else 0)


def submit(sweep: Sweep, states: list[State], options: argparse.Namespace) -> int:
    missing = [
        cell for cell, state in zip(sweep.cells, states, strict=True) if state.kind != "done"
    ]
    script = write_script(sweep, missing, options.sbatch)
    if shutil.which("sbatch") is None:
        print(
            f"sbatch is not on this machine; the array of {len(missing)} jobs is in {script}: sbatch {script}"
        )
        return 0
    return subprocess.run(["sbatch", str(script)], check=False).returncode
