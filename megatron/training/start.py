"""Where a run starts: at step 0, or at a checkpoint that fits; what would be lost, missed or mixed up is refused."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.training import checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """step and windows used so far, losses not yet logged, and the checkpoint's folder (None: a new run)."""

    step: int = 0
    windows: int = 0
    pending: tuple[float, ...] = ()
    path: Path | None = None


def starting_point(config: Config, facts: dict[str, Any], grid: Grid) -> Start:
    """Where this configuration starts; UserError where a checkpoint would be lost, missed or mixed up.

    facts: what `check_vocabulary` says about the data
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    held = checkpoint.latest_step(Path(save)) if save else None
    path = _checkpoint_of(load, save)
    if held is not None and (path is None or path.parent.resolve() != Path(save or "").resolve()):
        cure = f"set load: {save} to continue it, or save elsewhere"
        raise UserError(f"save: {save} holds a checkpoint of step {held} already - {cure}")
    if path is None:
        return Start()
    trained, meta = checkpoint.read_meta(path)
    _check_same_model(config, trained, path)
    _check_same_text(facts, meta, path)
    _check_engine(config, trained, meta, grid, path)
    return Start(meta["step"], meta["windows"], tuple(meta["pending_losses"]), path)


def _checkpoint_of(load: str | None, save: str | None) -> Path | None:
    """The folder global_stepN to continue from; None for a new run, also where load and save are one empty folder."""
    if load is None:
        return None
    same = save is not None and Path(load).resolve() == Path(save).resolve()
    if same and checkpoint.latest_step(Path(load)) is None:
        logger.info("no checkpoint in %s yet: starting at step 0", load)
        return None
    return checkpoint.find(load)


def _check_same_model(config: Config, trained: Config, path: Path) -> None:
    """Refuse another model than the checkpoint's; name every other difference."""
    now, then = config.model_keys(), trained.model_keys()
    broken = [
        f"{key}: {then.get(key)!r} there, {now[key]!r} here"
        for key in now
        if now[key] != then.get(key)
    ]
    if broken:
        raise UserError(
            f"load: {path} is another model ({'; '.join(broken)}) - use its configuration, or save elsewhere"
        )
    now, then = config.flat(), trained.flat()
    for key in [key for key in now if key not in config.model_keys() and now[key] != then.get(key)]:
        logger.info("continuing with another %s: %r, was %r", key, now[key], then.get(key))


def _check_same_text(facts: dict[str, Any], meta: dict[str, Any], path: Path) -> None:
    """Refuse a vocabulary or tokenizer other than the checkpoint's."""
    now, then = facts["tokenizer"], meta["tokenizer"]
    if now["hash"] != then["hash"] or facts["vocab"] != meta["vocab"]:
        raise UserError(
            f"load: {path} learned with {then['type']} {then['hash']} ({meta['vocab']} rows of vocabulary),"
            f" the data are written by {now['type']} {now['hash']} ({facts['vocab']} rows)"
            " - prepare them with that tokenizer"
        )


def _check_engine(
    config: Config, trained: Config, meta: dict[str, Any], grid: Grid, path: Path
) -> None:
    """ZeRO's optimizer state fits only the stage, the precision and the number of ranks that wrote it."""

    def says(one: Config, ranks: int) -> str:
        stage = one.parallel.zero_stage
        return f"{one.precision.dtype}, ZeRO stage {stage}" + (
            f", {ranks} rank(s)" if stage else ""
        )

    then, now = says(trained, meta["ranks"]), says(config, grid.ranks)
    if then != now:
        raise UserError(
            f"load: {path} was written with {then}; the engine's state does not fit {now} - use the same"
        )
