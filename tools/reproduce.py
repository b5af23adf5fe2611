"""Compare a paper's table with your own results.

python tools/reproduce.py kerple_table3 [--run] [--folder DIR]

Your own table is a .yml like those in megatron/results/published, with its sweep next to it.
Without --run, the rows that the sweep has so far are used; --run first runs the missing cells. A
cell is only compared if its rows measure what the table shows. Otherwise it is missing, or the
reason is shown.
"""

import subprocess
import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import ROOT, expanded
from megatron.results.files import read_rows
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
from megatron.sweeps.cells import Sweep, finished_rows, load_sweep
from megatron.sweeps.cost import windows_per_step


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("table", type="path", help="a .yml, or " + ", ".join(published_tables()))
    add("--run", action="store_true", help="run the missing cells first")
    add("--folder", type=Path, metavar="DIR", help="folder of the sweep's runs")
    add(
        "--results",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="use these rows instead of the sweep's",
    )
    options = parser.parse_args(argv)
    table = published(options.table)
    if table.sweep is None:
        raise UserError(f"{options.table}: cannot be reproduced here: {table.why_not}")
    # A shipped sweep, or one next to the user's own table.
    folder = ROOT / "configs" / "sweeps"
    if options.table.endswith(".yml"):
        folder = Path(options.table).parent
    file = folder / expanded(table.sweep)
    if options.run:
        command = [sys.executable, str(ROOT / "tools" / "sweep.py"), "run", str(file)]
        if options.folder is not None:
            command += ["--folder", str(options.folder)]
        if subprocess.run(command, check=False).returncode != 0:
            return 1
    sweep = load_sweep(file, options.folder)
    rows = read_rows(options.results) if options.results else finished_rows(sweep)
    cells = compare(table, rows, requirements(table, sweep))
    print(render(table, cells))
    if not all(cell.ours or cell.refused for cell in cells):
        places = options.results or [sweep.folder.resolve()]
        print("missing cells have no rows in", *places)
        print("name the folder of the runs with --folder, or add --run")
    if rows and not table.cells:
        print(f"\nours alone:\n{table_of_rows(rows)}")
    return 0


def requirements(table: Published, sweep: Sweep) -> Requirements:
    """What rows must have: a configuration of the sweep, evaluated without changes."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for cell in sweep.cells:
        # A sweep over one text need not name its corpus, because the rows do.
        corpora = [str(cell.values[CORPUS_AXIS])] if CORPUS_AXIS in cell.values else table.cells
        for corpus in corpora:
            key = (corpus, cell.config.position.pos_emb)
            hashes.setdefault(key, set()).add(cell.config.hash)
    config = sweep.cells[0].config
    length, steps = config.model.seq_length, config.training.train_iters
    facts = {"train_length": length, "step": steps, "part": table.part, "start": None}
    for evaluation in sweep.cells[0].evaluations:
        if evaluation.options.get("protocol") == table.protocol == "paper":
            facts["start"] = evaluation.options.get("start", 0)
    if table.windows is not None:
        facts["windows"] = table.windows
    return Requirements(facts, hashes, tokens=steps * windows_per_step(config) * length)


if __name__ == "__main__":
    sys.exit(main())
