"""The checkpoints in a run's folder: their steps, which one to continue, and a fine-tuning's
parent.

We only read names and records here; whatever needs an engine or a model is elsewhere. So training,
sweeps and evaluation agree on a run's parent, which counts for the configuration's hash.
"""

import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron.checkpoints.manifest import (
    FOLDER,
    OPTIMIZER,
    RECORD,
    Damaged,
    read_record,
    weights_of,
    write_record,
)
from megatron.config import Config
from megatron.config.schema import Parent
from megatron.errors import UserError
from megatron.files import read_small, remove

logger = logging.getLogger(__name__)

LONGEST_POINTER = 4096  # bytes of `latest`


def folder_of(run: Path, step: int) -> Path:
    """The folder of a run's checkpoint at a step."""
    return run / f"global_step{step}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name, or None if it is another kind of name."""
    named = FOLDER.fullmatch(path.name)
    return int(named[1]) if named else None


def steps_in(run: Path) -> list[int]:
    """Steps of the folders global_stepN that have files, ascending.

    A folder that has lost its checkpoint.json counts too: reading it gives a clear message.
    """
    steps = []
    for path in run.glob("global_step*"):
        step = step_of(path)
        if step is not None and path.is_dir() and any(path.iterdir()):
            steps.append(step)
    return sorted(steps)


def latest_step(run: Path) -> int | None:
    """The step in `latest`, else the newest one, or None if there is no checkpoint.

    `latest` decides, even if newer checkpoints exist, so that you can set a run back.
    """
    steps = steps_in(run)
    with suppress(OSError):
        text = read_small(run / "latest", LONGEST_POINTER).decode("utf-8", "replace")
        step = step_of(Path(text.strip()))
        if step in steps:
            return step
    return max(steps, default=None)


def find(folder: str | Path, step: int | None = None) -> Path:
    """The folder global_stepN that `folder` is or contains; raises UserError if there is none.

    A folder that has lost its checkpoint.json is found too: reading it gives a clear message, and
    nothing mistakes it for an empty folder.
    """
    folder = Path(folder)
    folder_step = step_of(folder)
    if folder_step is not None and folder.is_dir() and any(folder.iterdir()):
        if step not in (None, folder_step):
            raise UserError(
                f"checkpoint: {folder} belongs to step {folder_step}, not to step {step} - name the"
                " run's folder, or remove the step"
            )
        return folder
    if not folder.is_dir():
        raise UserError(
            f"checkpoint: there is no folder {folder}"
            " - train first, or set load to the folder that training saved to"
        )
    existing = steps_in(folder)
    number = latest_step(folder) if step is None else step
    if number in existing:
        return folder_of(folder, number)
    number = "N" if step is None else step
    steps = ", ".join(map(str, existing)) or "none"
    raise UserError(
        f"checkpoint: looked for global_step{number}/{RECORD} in {folder}, steps there: {steps} -"
        " check load and the step, or import checkpoints of other programs with"
        f" tools/import_checkpoint.py {folder} -o RUN"
    )


# --- removing -------------------------------------------------------------------------------------


def leftovers(run: Path) -> list[Path]:
    """Folders of checkpoints that are only partly written or partly deleted."""
    return sorted([*run.glob("partial_step*"), *run.glob("removing_*")])


def remove_unfinished(run: Path) -> None:
    """Remove what killed runs left half written or half deleted; only for the folder's owner."""
    for leftover in leftovers(run):
        _remove_if_possible(leftover)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half deleted one never looks complete.

    If it is a link to another run's checkpoint, only the link is deleted. Raises OSError if it
    cannot be renamed; if it cannot be deleted afterwards, there is a warning.
    """
    if os.path.lexists(path):
        renamed = path.with_name(f"removing_{path.name}")
        path.rename(renamed)
        _remove_if_possible(renamed)


def _remove_if_possible(path: Path) -> None:
    try:
        remove(path)
    except OSError as fault:  # NFS keeps a file while a process reads it
        logger.warning("%s: cannot be removed now (%s)", path, fault.strerror)


def keep_weights_only(folder: Path) -> None:
    """Delete the optimizer's state of every checkpoint in a run's folder; evaluation needs none.

    checkpoint.json stops listing the file before it is deleted, so even after an interruption all
    listed files exist. A checkpoint with a damaged record is left unchanged.
    """
    for step in steps_in(folder):
        path = folder_of(folder, step)
        if path.is_symlink():  # it belongs to another run
            continue
        try:
            record = read_record(path)
        except Damaged as damage:
            logger.warning("%s", damage)
            continue
        if record["files"].pop(OPTIMIZER, None):
            write_record(path, record)
        (path / OPTIMIZER).unlink(missing_ok=True)


# --- where a run starts -----------------------------------------------------------------------


def with_parent(config: Config) -> Config:
    """The configuration with the parent of its run, which counts for the hash.

    A run that continues has the parent that its checkpoint has. Raises UserError if there is no
    checkpoint to start from.
    """
    load = config["load"]
    save = config["save"]
    finetune = config["finetune"]
    if load is None and finetune:
        raise UserError(
            "load: is not set; finetune needs the folder of the checkpoint to start from"
        )
    parent = None
    if load is not None and (not finetune or is_one_folder(config)):
        # A run that has begun in another folder keeps its parent, even if `load` is gone.
        parent = (save and recorded_parent(Path(save))) or recorded_parent(Path(load))
        if parent is None and finetune:
            raise UserError(
                f"finetune: load and save are both {load}, which has no fine-tuned checkpoint -"
                " save elsewhere to start from its weights, or set finetune: false"
            )
    elif load is not None:
        # A run that has begun keeps its parent, even if that was trained further or is gone.
        parent = recorded_parent(Path(save)) if save else None
        parent_path = Path(parent.path or "").resolve() if parent else Path()
        if parent is None or Path(load).resolve() not in (parent_path, parent_path.parent):
            path = find(load)
            record = read_record(path)
            parent = Parent(
                path=str(path),
                step=record["step"],
                config_hash=record["config_hash"],
                weights=weights_of(path, record),
            )
    update = {"parent": parent or Parent()}
    return replace(config, checkpoint=config.checkpoint.model_copy(update=update))


def is_one_folder(config: Config) -> bool:
    """Whether a run loads from the folder to which it saves."""
    load, save = config.checkpoint.load, config.checkpoint.save
    return None not in (load, save) and Path(str(load)).resolve() == Path(str(save)).resolve()


def recorded_parent(folder: Path) -> Parent | None:
    """The parent in a run's checkpoint, or None; also None if its record is damaged."""
    try:
        parent = read_record(find(folder)).get("parent")
    except UserError:
        return None
    return Parent(**parent) if parent else None
