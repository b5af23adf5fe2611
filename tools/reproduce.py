"""A paper's table beside ours: python tools/reproduce.py kerple_table3 [--run] [--folder DIR]

A table of your own is a .yml like those in megatron/results/published, with its sweep beside it.
Without --run it takes what the sweep has measured so far; --run first does what is missing.
A cell is compared only where its rows answer the table's question. Others are missing, or refused
with the reason.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.errors import UserError
from megatron.files import ROOT
from megatron.results.files import read_results
from megatron.results.papers import (
    Published,
    Requirements,
    compare,
    published,
    published_tables,
    render,
)
from megatron.results.row import CORPUS_AXIS
from megatron.results.table import table as table_of_rows
from megatron.sweeps.cells import Cell, Sweep, finished_rows, load_sweep
from megatron.sweeps.cost import windows_per_step


@guarded
def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    table = published(options.table)
    file = _sweep_file(options.table, table)
    if options.run and not _run(file, options.folder):
        return 1
    sweep = load_sweep(file, options.folder)
    _show(table, sweep, options.results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="a .yml, or " + ", ".join(published_tables()))
    parser.add_argument("--run", action="store_true", help="first run what the sweep lacks")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the sweep's runs are")
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="FILE", help="take these rows, not the sweep's"
    )
    return parser


def _sweep_file(name: str, table: Published) -> Path:
    """The sweep of a table: a shipped one, or beside a table of the user's own."""
    if table.sweep is None:
        raise UserError(f"{name}: cannot be reproduced here: {table.why_not}")
    folder = Path(name).parent if name.endswith(".yml") else ROOT / "configs" / "sweeps"
    return folder / table.sweep


def _run(file: Path, folder: Path | None) -> bool:
    """Run what the sweep lacks, in a process of its own; whether it ended well."""
    command = [sys.executable, str(ROOT / "tools" / "sweep.py"), "run", str(file)]
    if folder is not None:
        command += ["--folder", str(folder)]
    return subprocess.run(command, check=False).returncode == 0


def _show(table: Published, sweep: Sweep, results: Sequence[Path] | None) -> None:
    rows = read_results(results) if results else finished_rows(sweep)
    cells = compare(table, rows, requirements(table, sweep))
    print(render(table, cells))
    empty = [cell for cell in cells if not cell.ours and not cell.refused]
    if empty and results:
        print(f"{len(empty)} of {len(cells)} cells have no rows: looked in", *results)
    elif empty:
        folder = sweep.folder.resolve()
        note = "" if folder.is_dir() else " (no such folder)"
        where = f"looked for runs of {sweep.path.name} in {folder}{note}"
        print(f"{len(empty)} of {len(cells)} cells have no rows: {where}")
        print("give --folder where the runs are, or --run")
    if rows and not table.cells:
        print(f"\nours alone:\n{table_of_rows(rows)}")


def requirements(table: Published, sweep: Sweep) -> Requirements:
    """What rows must be: of a configuration of the sweep, and evaluated as it is."""
    config = sweep.cells[0].config
    hashes: dict[tuple[str, str], set[str]] = {}
    for cell in sweep.cells:
        for corpus in _corpora(cell, table):
            key = (corpus, cell.config.position.pos_emb)
            hashes.setdefault(key, set()).add(cell.config.hash)
    tokens_per_step = windows_per_step(config) * config.model.seq_length
    return Requirements(
        hashes={key: frozenset(found) for key, found in hashes.items()},
        train_length=config.model.seq_length,
        step=config.training.train_iters,
        tokens=config.training.train_iters * tokens_per_step,
        start=_start(table, sweep),
    )


def _corpora(cell: Cell, table: Published) -> list[str]:
    """The corpus of a cell. A sweep of one text need not name it: its rows do."""
    if CORPUS_AXIS in cell.values:
        return [str(cell.values[CORPUS_AXIS])]
    return list(table.cells)


def _start(table: Published, sweep: Sweep) -> int | None:
    """The first window of the protocol `paper`, where that is the table's."""
    start = None
    for evaluation in sweep.cells[0].evaluations:
        if evaluation.options.get("protocol") == "paper" == table.protocol:
            start = evaluation.options.get("start", 0)
    return start


if __name__ == "__main__":
    sys.exit(main())
