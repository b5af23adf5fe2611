"""The checkpoints in a run's folder: their steps, the one that `latest` names, leftovers."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoints.manifest import FOLDER, RECORD
from megatron.errors import UserError
from megatron.files import read_small, remove

logger = logging.getLogger(__name__)

LONGEST_POINTER = 4096  # bytes of `latest`
MISSING = "is missing"  # said of `latest`; whoever copies checkpoints may leave it behind
# Files of Hugging Face and of GPT-NeoX.
OF_OTHERS = ("config.json", "layer_*-model_*.pt")
LEFTOVERS = ("partial_step*", "removing_*")  # of a process that died while it saved or deleted


def folder_of(run: Path, step: int) -> Path:
    """The folder of a run's checkpoint."""
    return run / f"global_step{step}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says; None for another kind of name."""
    named = FOLDER.fullmatch(path.name)
    return int(named[1]) if named else None


def steps_in(run: Path) -> list[int]:
    """Steps of the checkpoints in a folder that have a checkpoint.json, ascending."""
    steps = [step_of(path.parent) for path in run.glob(f"global_step*/{RECORD}")]
    return sorted(step for step in steps if step is not None)


def without_record(run: Path) -> list[int]:
    """Steps of folders that hold files, but have lost their checkpoint.json, ascending."""
    steps = [step_of(path) for path in run.glob("global_step*") if lost_its_record(path)]
    return sorted(step for step in steps if step is not None)


def lost_its_record(path: Path) -> bool:
    """Whether a folder global_stepN holds files, but no checkpoint.json."""
    if step_of(path) is None or not path.is_dir() or (path / RECORD).exists():
        return False
    return any(path.iterdir())


def leftovers(run: Path) -> list[Path]:
    """Folders of checkpoints that were not finished or not wholly deleted."""
    return sorted(path for pattern in LEFTOVERS for path in run.glob(pattern))


def latest_step(run: Path) -> int | None:
    """The step that `latest` names, or the newest one; None where there is no checkpoint."""
    return pointed(run)[0]


def pointed(run: Path) -> tuple[int | None, str | None]:
    """(the step to use, what is odd about `latest` or about the checkpoints, or None).

    `latest` decides, also where newer checkpoints exist, so that a run can be set back by hand.
    The step may be that of a folder that has lost its checkpoint.json: whoever reads it says so.
    """
    whole = steps_in(run)
    damaged = without_record(run)
    newest = max(whole or damaged, default=None)
    pointer = run / "latest"
    if not os.path.lexists(pointer):
        newer = [step for step in damaged if whole and step > whole[-1]]
        lost = f"global_step{newer[-1]} has no {RECORD}" if newer else None
        return newest, lost or (MISSING if whole else None)
    step, fault = _named(pointer)
    if step is None or step not in (*whole, *damaged):
        return newest, fault or f"names global_step{step}, which is not there"
    newer = [str(other) for other in whole if other > step]
    note = f"is older than other checkpoints there ({', '.join(newer)})" if newer else None
    return step, note


def _named(pointer: Path) -> tuple[int | None, str | None]:
    """(the step that the file `latest` names, what is wrong with the file)."""
    try:
        content = read_small(pointer, LONGEST_POINTER)
    except OSError as fault:
        return None, f"cannot be read ({fault.strerror})"
    if not content.strip():
        return None, "is empty"
    named = FOLDER.fullmatch(content.decode("utf-8", "replace").strip())
    if named is None:
        return None, f"is damaged (it holds {content[:20]!r})"
    return int(named[1]), None


def chosen(folder: str | Path, step: int | None = None) -> Path:
    """The same as `find`, with a warning where `latest` does not simply name the newest step."""
    path = find(folder, step)
    run = Path(folder)
    if step is None and path != run:
        note = pointed(run)[1]
        if note:
            logger.warning("%s/latest: %s; step %d is used", run, note, step_of(path))
    return path


def find(folder: str | Path, step: int | None = None) -> Path:
    """The folder global_stepN that `folder` is or holds.

    UserError says what was looked for. A folder that has lost its checkpoint.json is found too:
    reading it says so, and nobody takes it for an empty place.
    """
    folder = Path(folder)
    if FOLDER.fullmatch(folder.name) and ((folder / RECORD).exists() or lost_its_record(folder)):
        if step not in (None, step_of(folder)):
            raise UserError(
                f"checkpoint: {folder} is the one of step {step_of(folder)}, not of step {step}"
                " - name the run's folder, or leave the step out"
            )
        return folder
    if not folder.is_dir():
        raise UserError(
            f"checkpoint: no folder {folder}"
            " - train first, or set load to the folder that training saved to"
        )
    number = latest_step(folder) if step is None else step
    existing = steps_in(folder)
    if number in existing:
        return folder_of(folder, number)
    if number is not None and lost_its_record(folder_of(folder, number)):
        return folder_of(folder, number)
    wanted = "N" if step is None else step
    steps = ", ".join(map(str, existing)) or "none"
    cure = "check load and the step"
    if any(next(folder.glob(pattern), None) for pattern in OF_OTHERS):
        cure = f"tools/import_checkpoint.py {folder} -o RUN brings in what other programs wrote"
    raise UserError(
        f"checkpoint: looked for global_step{wanted}/{RECORD} in {folder},"
        f" steps there: {steps} - {cure}"
    )


def newest_good(path: Path, is_good: Callable[[Path], bool]) -> Path | None:
    """The checkpoint of the same run to take instead of a damaged one; None where there is none.

    It is the newest good one before it, else the newest good one: a run that was set back by hand
    does not jump ahead.
    """
    run, step = path.parent, step_of(path)
    if step is None:
        return None
    newest_first = steps_in(run)[::-1]
    before = [other for other in newest_first if other < step]
    after = [other for other in newest_first if other > step]
    for other in before + after:
        candidate = folder_of(run, other)
        if is_good(candidate):
            return candidate
    return None


def remove_unfinished(run: Path) -> None:
    """Remove what killed runs left half written or half deleted; for the folder's owner alone.

    What cannot be removed, as where NFS keeps a file that somebody reads, is a warning.
    """
    for leftover in leftovers(run):
        _remove_if_possible(leftover)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half deleted one never looks complete.

    Of a link to another run's checkpoint the link is deleted. OSError where it cannot be renamed;
    what then cannot be deleted is a warning.
    """
    if os.path.lexists(path):
        renamed = path.with_name(f"removing_{path.name}")
        path.rename(renamed)
        _remove_if_possible(renamed)


def _remove_if_possible(path: Path) -> None:
    try:
        remove(path)
    except OSError as fault:
        logger.warning("%s: cannot be removed now (%s)", path, fault.strerror)
