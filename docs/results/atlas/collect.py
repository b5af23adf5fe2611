"""Copy the rows of the atlas's finished cells from runs/sweeps/atlas to this folder.

python docs/results/atlas/collect.py

Run it as often as you like, also while the sweep runs: a row replaces the one of the same
measurement. Commit the files afterwards: `make results PART=atlas` skips cells that have rows here.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from megatron.results.files import write_results
from megatron.sweeps.cells import finished_rows, load_sweep, state_of

sweep = load_sweep("atlas")
finished = tuple(cell for cell in sweep.cells if state_of(cell).kind == "done")
rows_of_data = defaultdict(list)
for row in finished_rows(replace(sweep, cells=finished)):
    rows_of_data[row.get("cell", {})["data"]].append(row)
for data, rows in rows_of_data.items():
    write_results(Path(__file__).with_name(f"{data}.jsonl"), rows)
