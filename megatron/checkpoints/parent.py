"""The parent of a fine-tuning: the checkpoint whose weights a run with finetune: true starts from.

It is found at one place, so that training, sweeps and evaluation agree on the configuration's hash.
Only records are read.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.checkpoints.manifest import MOST_STEPS, WEIGHTS, Damaged, read_record, weights_of
from megatron.checkpoints.saved import chosen, find, folder_of, latest_step, step_of, steps_in
from megatron.config import Config
from megatron.config.schema import Parent
from megatron.errors import CONTROL, UserError

logger = logging.getLogger(__name__)


def with_parent(config: Config) -> Config:
    """The configuration with the parent of its run, which counts for the hash.

    A run that continues has the parent that its checkpoint has. UserError where there is no
    checkpoint to start from, and where another parent was set by hand.
    """
    parent = _parent(config)
    given = config.checkpoint.parent
    if "parent" in config.given:
        for key in Parent.model_fields:
            value, real = getattr(given, key), getattr(parent, key)
            if value is not None and value != real:
                raise UserError(
                    f"parent.{key}: {value} is not that of this run, {real}"
                    " - drop parent; training writes it"
                )
    checkpoint = config.checkpoint.model_copy(update={"parent": parent})
    return replace(config, checkpoint=checkpoint)


def checkpoint_to_continue(config: Config) -> Path | None:
    """The folder global_stepN that a run goes on from; None for a new run, fine-tuned or not.

    config: with its parent. A run is new too where load and save are one folder without
    checkpoints. A fine-tuning goes on where `save` holds a checkpoint of this very configuration.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None:
        return None
    if config.checkpoint.finetune and not _is_one_folder(config):
        return _own_checkpoint(config, save)
    if _is_one_folder(config) and latest_step(Path(load)) is None:
        logger.info("no checkpoint in %s yet: starting at step 0", load)
        return None
    return chosen(load)


def _own_checkpoint(config: Config, save: str | None) -> Path | None:
    """The checkpoint in `save` if the same configuration wrote it."""
    if save is None or latest_step(Path(save)) is None:
        return None
    path = chosen(save)
    try:
        same = read_record(path)["config_hash"] == config.hash
    except Damaged:
        return path  # whoever starts from it says what is wrong, or takes another one
    return path if same else None


def _parent(config: Config) -> Parent:
    load, finetune = config.checkpoint.load, config.checkpoint.finetune
    if load is None:
        if finetune:
            raise UserError("load: not given; finetune starts from the checkpoint in this folder")
        return Parent()
    if not finetune:
        return recorded_parent(Path(load)) or Parent()
    if not _is_one_folder(config):
        return _of_a_finetuning(config, Path(load))
    parent = recorded_parent(Path(load))
    if parent is None:
        raise UserError(
            f"finetune: load and save are both {load}, which holds no fine-tuned checkpoint - save"
            " elsewhere to start from its weights, or set finetune: false"
        )
    return parent


def _is_one_folder(config: Config) -> bool:
    load, save = config.checkpoint.load, config.checkpoint.save
    return None not in (load, save) and Path(str(load)).resolve() == Path(str(save)).resolve()


def recorded_parent(folder: Path) -> Parent | None:
    """The parent that checkpoints of a run have in common; None where they have none.

    Damaged records are passed over.
    """
    for path in _checkpoints(folder):
        try:
            record = read_record(path)
        except Damaged:
            continue
        parent = record.get("parent")
        return Parent(**{key: parent[key] for key in Parent.model_fields}) if parent else None
    return None


def _checkpoints(folder: Path) -> Iterator[Path]:
    """A checkpoint, then the others of its run, newest first; nothing where there is none."""
    try:
        path = find(folder)
    except UserError:
        return
    yield path
    for step in reversed(steps_in(path.parent)):
        if step != step_of(path):
            yield folder_of(path.parent, step)


def _of_a_finetuning(config: Config, load: Path) -> Parent:
    """The parent that a fine-tuning in `save` began with, if `load` names it; else that of `load`.

    So it goes on although its parent has been trained further, or is gone.
    """
    save = config.checkpoint.save
    begun_with = recorded_parent(Path(save)) if save else None
    if begun_with is not None and _names(load, begun_with):
        return begun_with
    return parent_at(find(load))


def _names(load: Path, parent: Parent) -> bool:
    """Whether a folder to load is that of a parent, or of its run."""
    try:
        path = find(load, parent.step)
        return weights_of(path, read_record(path)) == parent.weights
    except (UserError, OSError):
        known = Path(parent.path or "")
        is_there = load.resolve() in (known.resolve(), known.parent.resolve())
        if is_there:
            logger.info(
                f"{known}, the parent of this fine-tuning (weights {parent.weights}), is gone:"
                " going on from the checkpoint in save"
            )
        return is_there


def parent_at(path: Path) -> Parent:
    """A checkpoint as the parent of others: {path, step, config_hash, weights}."""
    if CONTROL.search(str(path)):  # every result row repeats it
        raise UserError(f"load: {path} has a control character in its name - rename it")
    record = read_record(path)
    try:
        weights = weights_of(path, record)
    except OSError as fault:
        raise Damaged([f"{path / WEIGHTS}: cannot be read ({fault.strerror})"]) from None
    step, config_hash = record["step"], record["config_hash"]
    if step > MOST_STEPS:
        raise Damaged([f"{path}: no training has {step} steps"])
    return Parent(path=str(path), step=step, config_hash=config_hash, weights=weights)
