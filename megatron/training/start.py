"""Where a run starts: at step 0, or at a checkpoint that fits. All else is refused."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.training import checkpoint
from megatron.training.universal import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """step, windows used so far, losses not yet logged, steps skipped, and the checkpoint's folder.

    path: None for a new run
    written_by: the engine whose state the folder holds
    threads: of the CPU that computed before; None where that is unknown
    """

    step: int = 0
    windows: int = 0
    pending: tuple[float, ...] = ()
    path: Path | None = None
    written_by: Engine | None = None
    threads: int | None = None
    skipped: int = 0


def starting_point(config: Config, facts: dict[str, Any], grid: Grid) -> Start:
    """Where this configuration starts.

    facts: those of `check_vocabulary`. UserError where `save` holds another run's checkpoint, or
    where the checkpoint to load does not fit.
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    path = _checkpoint_of(load, save)
    if save:
        _check_nothing_lost(Path(save), path)
    if path is None:
        return Start()
    trained, meta = checkpoint.read_meta(path)
    _check_same_model(config, trained, path)
    _check_same_text(facts, meta, path)
    _check_batch(config, meta, grid, path)
    if meta["step"] < config.training.train_iters:
        checkpoint.check_engine_state(path)
    pending_losses = tuple(meta["pending_losses"])
    return Start(
        step=meta["step"],
        windows=meta["windows"],
        pending=pending_losses,
        path=path,
        written_by=Engine.of(trained, meta["ranks"]),
        threads=meta.get("threads"),
        skipped=meta.get("skipped", 0),
    )


def _check_nothing_lost(save: Path, path: Path | None) -> None:
    """Refuse to start into a folder of checkpoints that the run does not continue."""
    step = checkpoint.latest_step(save)
    if step is None:
        return
    continues = path is not None and path.parent.resolve() == save.resolve()
    if not continues:
        cure = f"set load: {save} to continue it, or save elsewhere"
        raise UserError(f"save: {save} holds a checkpoint of step {step} already - {cure}")


def _checkpoint_of(load: str | None, save: str | None) -> Path | None:
    """The folder global_stepN to continue from, or None for a new run.

    A run is new too where load and save are one folder without checkpoints.
    """
    if load is None:
        return None
    same = save is not None and Path(load).resolve() == Path(save).resolve()
    if same and checkpoint.latest_step(Path(load)) is None:
        logger.info("no checkpoint in %s yet: starting at step 0", load)
        return None
    return checkpoint.find(load)


def _check_same_model(config: Config, trained: Config, path: Path) -> None:
    """Refuse another model than the checkpoint's; log every other difference."""
    now, then = config.model_keys(), trained.model_keys()
    differences = []
    for key, value in now.items():
        if value != then.get(key):
            differences.append(f"{key}: {then.get(key)!r} there, {value!r} here")
    if differences:
        raise UserError(
            f"load: {path} is another model ({'; '.join(differences)})"
            " - use its configuration, or save elsewhere"
        )
    then = trained.flat()
    for key, value in config.flat().items():
        if key not in now and value != then.get(key):
            logger.info("continuing with another %s: %r, was %r", key, value, then.get(key))


def _check_same_text(facts: dict[str, Any], meta: dict[str, Any], path: Path) -> None:
    """Refuse a vocabulary or tokenizer other than the checkpoint's."""
    now, then = facts["tokenizer"], meta["tokenizer"]
    if now["hash"] == then["hash"] and facts["vocab"] == meta["vocab"]:
        return
    raise UserError(
        f"load: {path} learned with {then['type']} {then['hash']}"
        f" ({meta['vocab']} rows of vocabulary),"
        f" the data are written by {now['type']} {now['hash']} ({facts['vocab']} rows)"
        " - prepare them with that tokenizer"
    )


def _check_batch(config: Config, meta: dict[str, Any], grid: Grid, path: Path) -> None:
    """Refuse another number of ranks where it changes the windows of a step.

    A train_batch_size that fits the new number says that the change is meant.
    """
    training = config.training
    ranks, windows = meta.get("ranks", grid.ranks), meta.get("windows_per_step")
    rows = training.train_micro_batch_size_per_gpu * grid.ranks
    now = rows * training.gradient_accumulation_steps
    if ranks == grid.ranks or windows in (None, now) or training.train_batch_size is not None:
        return
    cure = f"train_batch_size={now} if that is meant"
    if windows % rows == 0:
        cure = f"gradient_accumulation_steps={windows // rows} to keep it, or {cure}"
    elif windows % grid.ranks == 0:
        keeping = f"train_micro_batch_size_per_gpu={windows // grid.ranks}"
        cure = f"{keeping} gradient_accumulation_steps=1 to keep it, or {cure}"
    raise UserError(
        f"load: a step of {path} took {windows} windows on {ranks} rank(s), here it would take"
        f" {now} on {grid.ranks} - set {cure}"
    )
