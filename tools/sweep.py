"""Run many trainings from one file, and continue where they stopped.

python tools/sweep.py run configs/sweeps/cpu.yml --dry-run   the plan and its cost
python tools/sweep.py run kerple_table3 --dry-run --device a100 --jobs 8   on eight A100
python tools/sweep.py run configs/sweeps/cpu.yml             run the missing cells; may be repeated
python tools/sweep.py run kerple_table3 --launcher slurm --launcher-args time=600 gpus_per_node=1
python tools/sweep.py status configs/sweeps/cpu.yml
python tools/sweep.py collect configs/sweeps/cpu.yml         the rows so far, even during a run
python tools/sweep.py run atlas --entry my_encoding.py       your encoding among the others
python tools/sweep.py check atlas --entry my_encoding.py     do the rows in my_encoding.jsonl fit?
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.config.load import DATA_PATHS
from megatron.config.schema import as_list
from megatron.config.yaml_files import read_overrides
from megatron.data.tokens import preparing
from megatron.errors import UserError, visible
from megatron.evaluation.options import number
from megatron.results.atlas import REFERENCE, atlas_rows, decided, standings
from megatron.results.files import read_rows
from megatron.results.row import identity
from megatron.splits import TASK_PREFIX
from megatron.sweeps.cells import (
    State,
    Sweep,
    collect,
    described,
    load_sweep,
    state_of,
)
from megatron.sweeps.cost import DEVICES, UTILISATION, cost, hours
from megatron.sweeps.engines import LAUNCHERS, run_on
from megatron.sweeps.runner import Runner, places_of

PLACE = ("corpus", "split", "length", "windows")  # rows that are equal in these scored one text


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    commands = ("run", "status", "collect", "check")
    add("what", choices=commands, help="run missing cells, or show, collect or check cells")
    add("file", type="path", help="a file as in configs/sweeps, or the name of one there")
    add("--folder", type=Path, metavar="DIR", help="folder of the runs; default: runs/sweeps/NAME")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="AXIS=VALUE[,VALUE]",
        help="run only some cells of the grid",
    )
    add(
        "--entry",
        type=Path,
        metavar="FILE",
        help="your encoding in place of the sweep's: Python that registers it, or YAML",
    )
    add(
        "--skip",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="skip the cells that have rows in these files",
    )
    add("--dry-run", action="store_true", help="show the plan and its cost, and run nothing")
    add(
        "--jobs",
        type=number(1, 10**4),
        metavar="N",
        help="runs at a time; default: one per GPU, or one",
    )
    add(
        "--launcher",
        choices=("local", *LAUNCHERS),
        default="local",
        help="what starts the cells: this process, Ray, or Slurm (docs/sweeps.md)",
    )
    add(
        "--launcher-args",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="resources of each cell, by Ray's or Slurm's own names",
    )
    add("--device", choices=[*DEVICES], help="show the time on a device")
    options = parser.parse_args(argv)

    faults = []
    resources_of_job = read_overrides(options.launcher_args, faults.append)
    if faults or (options.launcher == "local" and resources_of_job):
        raise UserError("--launcher-args: needs KEY=VALUE, and --launcher ray or slurm")
    file, folder, entry = options.file, options.folder, options.entry
    if options.what == "collect":
        print(collected(file, folder, entry))
        return 0
    sweep = load_sweep(file, folder, options.only, entry)
    if options.what == "check":
        return check(sweep, entry)
    measured = {row["config_hash"] for row in read_rows(options.skip)}
    cells = tuple(cell for cell in sweep.cells if cell.config.hash not in measured)
    if not cells:
        raise UserError("--skip: all cells have rows")
    sweep = replace(sweep, cells=cells)
    states = [state_of(cell) for cell in sweep.cells]
    if options.what == "status":
        print("\n".join(status(sweep, states)))
        return int(any(state.kind in ("failed", "damaged") for state in states))
    print(plan(sweep, states, options.jobs, options.device), flush=True)
    absent = absent_data(sweep, states)
    if options.dry_run:
        for line in absent:
            print(line)
        return 0
    if absent:
        raise UserError("\n".join([*absent, "or choose cells with --only AXIS=VALUE"]))

    runner = Runner(say)
    if options.launcher == "local":
        runner.run(sweep.cells, places_of(options.jobs))
    else:
        run_on(options.launcher, resources_of_job, runner, sweep, options.jobs)
    print(collected(file, folder, entry))
    missing = [
        f"{cell.name}: {described(cell, state)}"
        for cell in sweep.cells
        if (state := state_of(cell)).kind != "done"
    ]
    if missing:
        print(
            "\n  ".join([f"{len(missing)} of {len(sweep.cells)} cells are missing:", *missing]),
            file=sys.stderr,
        )
    if runner.stopping:
        return 130
    if entry and sweep.results.exists():
        print(place_of_entry(entry.stem, sweep.results))
    return int(bool(missing))


def say(text: str) -> None:
    """Print a whole line, even if several threads print."""
    print(f"{visible(text)}\n", end="", flush=True)


def collected(file: str, folder: Path | None, entry: Path | None) -> str:
    """Write the rows of all cells, because those outside --only must be kept."""
    whole = load_sweep(file, folder, entry=entry)
    return f"{len(collect(whole))} rows in {whole.results}"


def place_of_entry(name: str, results: Path) -> str:
    """Where an entry stands in the atlas, and what its rows decide against the best and ALiBi."""
    rows = atlas_rows([results])
    standing = standings(rows)
    others = standing.cells.index.drop(name, errors="ignore")
    verdicts = decided(name, others[others.isin([others[0], REFERENCE])], rows)
    return f"{standing.table().text()}\n\n{verdicts.text()}"


def check(sweep: Sweep, entry: Path | None) -> int:
    """Check the rows beside an entry, in ENTRY.jsonl: their cells, lengths and texts."""
    if not entry:
        raise UserError("check: needs --entry FILE, with its rows in FILE's name .jsonl")
    rows = read_rows([entry.with_suffix(".jsonl")])
    measured = Counter((row["config_hash"], row["length"]) for row in rows)
    faults = []
    for cell in sweep.cells:
        wanted = Counter(
            (cell.config.hash, length)
            for call in cell.evaluations
            for length in call.options.get("lengths", cell.config.evaluation.eval_lengths)
        )
        if not wanted <= measured:
            faults.append(
                f"{cell.name}: lacks rows of configuration {cell.config.hash} - run the sweep with"
                " this entry"
            )
        measured -= wanted
    if measured:
        faults.append("rows of other configurations or lengths than this entry's - delete them")
    texts = {identity(row, PLACE): row.get("text") for row in atlas_rows()}
    faults += [
        f"{row.get('corpus')} at {row['length']}: not the atlas's text - prepare its data, and run"
        " the sweep with this entry again"
        for row in rows
        if texts.get(identity(row, PLACE)) not in (None, row.get("text"))
    ]
    if faults:
        raise UserError("\n".join([f"{entry} is no entry yet:", *faults]))
    print(f"{entry}: {len(rows)} rows of {len(sweep.cells)} cells follow the rules")
    return 0


def status(sweep: Sweep, states: Sequence[State]) -> list[str]:
    """A line for the sweep, then one for each cell."""
    kinds = Counter(state.kind for state in states)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    width = max(len(cell.name) for cell in sweep.cells)
    return [
        f"{sweep.name}: {len(states)} cells, {counts}; runs in {sweep.folder}",
        *(
            f"{cell.name:<{width}}  {described(cell, state)}"
            for cell, state in zip(sweep.cells, states, strict=True)
        ),
    ]


def plan(sweep: Sweep, states: Sequence[State], jobs: int | None, device_name: str | None) -> str:
    """The cells that will run, and their cost."""
    tokens, training, evaluation = cost(sweep, states)
    time = "time: --device NAME shows it"
    if device_name is not None:
        devices = jobs or 1
        to_train = hours(training, device_name) / devices
        to_evaluate = hours(evaluation, device_name) / devices
        time = (
            f"time: {to_train + to_evaluate:,.2f} hours on {devices} x {device_name},"
            f" {to_train:,.2f} to train and {to_evaluate:,.2f} to evaluate"
            f" (assumed: {UTILISATION:.0%} of its data sheet's peak for each number format)"
        )
    return "\n".join(
        [
            status(sweep, states)[0],
            f"to do: train on {tokens / 1e6:,.1f} million tokens"
            f" ({sum(training.values()):.2e} FLOP), and evaluate"
            f" ({sum(evaluation.values()):.2e} FLOP)",
            time,
            "not included: downloads, tokenising, memory and disk",
        ]
    )


def absent_data(sweep: Sweep, states: Sequence[State]) -> list[str]:
    """A line for each missing corpus, with the command that makes it."""
    prefixes = {
        path
        for cell, state in zip(sweep.cells, states, strict=True)
        if state.kind != "done"
        for key in DATA_PATHS
        for path in as_list(cell.config[key])
    }
    return [
        f"data are missing: {prefix} - {sweep.prepare or preparing(prefix)}"
        for prefix in sorted(prefixes)
        if not prefix.startswith(TASK_PREFIX) and not Path(f"{prefix}.idx").exists()
    ]


if __name__ == "__main__":
    sys.exit(main())
