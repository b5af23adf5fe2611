"""A paper's table beside ours: python tools/reproduce.py kerple-table3 [--run] [--folder runs/sweeps/kerple_table3]

A table of your own is a .yml as those in megatron/evaluation/published; its `sweep` is then looked for beside it.
Without --run it takes what the sweep has collected so far; --run does what is missing first (see tools/sweep.py).
A cell is compared only where its rows answer the table's question; all others are missing or refused, with the reason.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from megatron.errors import UserError
from megatron.files import ROOT
from megatron.results.files import read_results
from megatron.results.published import Published, published, tables
from megatron.results.reproduce import Asked, compare, render, unmatched
from megatron.results.table import table as report_table
from megatron.sweeps.cost import windows_per_step
from megatron.sweeps.plan import Sweep, load_sweep
from megatron.sweeps.state import finished_rows, other_runs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="a .yml, or " + ", ".join(tables()))
    parser.add_argument("--run", action="store_true", help="do what is missing of the sweep first")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the sweep's runs are")
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="FILE", help="take these rows, not the sweep's"
    )
    options = parser.parse_args(argv)
    try:
        table = published(options.table)
        if table.said["sweep"] is None:
            raise UserError(
                f"{options.table}: cannot be reproduced here: {table.said.get('why_not', 'it names no sweep')}"
            )
        own = options.table.endswith(".yml")
        file = (Path(options.table).parent if own else ROOT / "configs" / "sweeps") / table.said[
            "sweep"
        ]
        folder = ["--folder", str(options.folder)] if options.folder else []
        command = [sys.executable, str(ROOT / "tools" / "sweep.py"), "run", str(file), *folder]
        if options.run and subprocess.run(command, check=False).returncode:
            return 1
        sweep = load_sweep(file, options.folder)
        rows = read_results(options.results) if options.results else finished_rows(sweep)
        print(render(table, compare(table, rows, asked(table, sweep))))
        if options.results and table.cells and (count := unmatched(table, rows)):
            print(
                f"{count} of {len(rows)} rows match no cell: another corpus, encoding, length or protocol"
            )
        if not rows and (others := other_runs(sweep)):
            shown = ", ".join(others[:3]) + (
                f" and {len(others) - 3} more" if len(others) > 3 else ""
            )
            print(
                f"{sweep.folder}: holds other runs than {file.name}'s: {shown} - give their sweep's table or --folder"
            )
        if rows and not table.cells:
            print(f"\nours alone:\n{report_table(rows)}")
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


def asked(table: Published, sweep: Sweep) -> Asked:
    """The question of a table: the configurations of its sweep."""
    config = sweep.cells[0].config
    hashes: dict[tuple[str, str], set[str]] = {}
    for cell in sweep.cells:
        # A sweep of one text need not have the axis `data`: its rows say themselves which corpus it is.
        for corpus in [str(cell.values["data"])] if "data" in cell.values else table.cells:
            hashes.setdefault((corpus, cell.config.position.pos_emb), set()).add(cell.config.hash)
    said = [one.options for one in sweep.cells[0].evaluations]
    starts = {
        one["protocol"]: one.get("start", 0) for one in said if one.get("protocol") == "paper"
    }
    return Asked(
        hashes={key: frozenset(found) for key, found in hashes.items()},
        train_length=config.model.seq_length,
        step=config.training.train_iters,
        tokens=config.training.train_iters * windows_per_step(config) * config.model.seq_length,
        start=starts.get(table.said["protocol"]),
    )
