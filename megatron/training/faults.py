"""What any rank finds wrong with a checkpoint, each of them hashing its share of the files."""

from collections.abc import Iterable
from pathlib import Path

from megatron.checkpoints.manifest import faults_of
from megatron.parallel.grid import Grid


def shared_file_faults(path: Path, grid: Grid, names: Iterable[str] | None = None) -> list[str]:
    """The faults of a folder global_stepN; every rank calls this and gets the same.

    names: look at these files alone; None for all
    """
    own = faults_of(path, names, part=grid.rank, parts=grid.ranks)
    every = [fault for faults in grid.gather(own) for fault in faults]
    return list(dict.fromkeys(every))
