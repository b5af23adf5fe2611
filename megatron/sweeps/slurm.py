"""A sweep as an array of Slurm jobs, one for each cell that is not done."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.files import ROOT
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
exec {python} {tool} run {file} --folder {folder} --only ${{CELLS[$SLURM_ARRAY_TASK_ID]}}
"""


def write_script(sweep: Sweep, missing: Sequence[Cell], options: Sequence[str] = ()) -> Path:
    """SWEEP/slurm.sh; `options` are further words of sbatch. Each job resumes its cell, so it may be sent again."""
    folder = sweep.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [
        " ".join(f"{axis}={value}" for axis, value in cell.values.items()) for cell in missing
    ]
    text = SCRIPT.format(
        name=shlex.quote(sweep.name),
        last=len(missing) - 1,
        folder=shlex.quote(str(folder)),
        options="".join(f"#SBATCH {option}\n" for option in options),
        cells="\n".join(f"  {shlex.quote(words)}" for words in chosen),
        here=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        tool=shlex.quote(str(ROOT / "tools" / "sweep.py")),
        file=shlex.quote(str(sweep.path.resolve())),
    )
    path = folder / "slurm.sh"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path
