"""Checkpoints of another engine than the one that would continue them."""

from pathlib import Path

from megatron.checkpoints.manifest import read_record, write_record
from tests.bad_inputs.case import MODEL, Case

RESUME = [
    "train.py",
    *MODEL,
    "train_iters=8",
    "eval_interval=0",
    "data_path={corpus}",
    "save=copy",
    "load=copy",
]


def _of_two_ranks(here: Path) -> None:
    """Let the checkpoint say that two ranks wrote it, with eight windows a step."""
    path = here / "copy" / "global_step4"
    write_record(path, read_record(path) | {"ranks": 2, "windows_per_step": 8})


CASES = [
    Case(
        "other-ranks-halve-the-batch",
        RESUME,
        "load: a step of copy/global_step4 took 8 windows on 2 rank(s), here it would take 4 on 1"
        " - change gradient_accumulation_steps to keep it, or set train_batch_size=4 if that is"
        " meant",
        prepare=_of_two_ranks,
        copies_run=True,
    ),
]
