"""A sweep as an array of Slurm jobs, one for each cell that is not done."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.files import ROOT, atomic_write
from megatron.sweeps.plan import Cell, Sweep

SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --gpus-per-task=1
#SBATCH --ntasks=1
#SBATCH --signal=B:TERM@120
#SBATCH --output={folder}/slurm-%A_%a.log
{options}CELLS=(
{cells}
)
cd {here}
exec {python} {tool} run {file} --folder {folder}{flags} --only ${{CELLS[$SLURM_ARRAY_TASK_ID]}}
"""


def write_script(sweep: Sweep, missing: Sequence[Cell], options: Sequence[str] = ()) -> Path:
    """Write SWEEP/slurm.sh and return its path.

    Each job resumes its cell, so the script may be sent again. options: further words of sbatch
    """
    folder = sweep.folder.resolve()
    tool = ROOT / "tools" / "sweep.py"
    text = SCRIPT.format(
        name=shlex.quote(sweep.name),
        last=len(missing) - 1,
        folder=shlex.quote(str(folder)),
        options="".join(f"#SBATCH {option}\n" for option in options),
        cells="\n".join(f"  {shlex.quote(_words(cell))}" for cell in missing),
        here=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        tool=shlex.quote(str(tool)),
        file=shlex.quote(str(sweep.path.resolve())),
        flags=" --keep-states" if sweep.keep_states else "",
    )
    path = folder / "slurm.sh"
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
    return path


def _words(cell: Cell) -> str:
    """The cell in the words of --only."""
    return " ".join(f"{axis}={value}" for axis, value in cell.values.items())
