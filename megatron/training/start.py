"""Where a run starts: at step 0, or at a checkpoint that fits. All else is refused."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoints.manifest import (
    Stamps,
    engine_files,
    note_opened,
    read_record,
    stamps,
)
from megatron.checkpoints.parent import checkpoint_to_continue
from megatron.checkpoints.read import read_meta, replaced
from megatron.checkpoints.saved import latest_step, newest_good
from megatron.config import Config
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.training.checkpoint import check_engine_state
from megatron.training.faults import shared_file_faults
from megatron.training.finetune import ParentModel, parent_model
from megatron.training.universal import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """step, windows used so far, losses not yet logged, steps skipped, and the checkpoint's folder.

    path: None for a new run
    parent: whose weights a new run takes; None where it has first values of its own
    trained: the configuration of the checkpoint that a run continues
    parent_model: encoding and step of the parent, in words; None for a run that has no parent
    written_by: the engine whose state the folder holds
    record: checkpoint.json there
    stamps: of its files when they were verified
    threads: of the CPU that computed before; None where that is unknown
    """

    step: int = 0
    windows: int = 0
    pending: tuple[float, ...] = ()
    path: Path | None = None
    written_by: Engine | None = None
    record: dict[str, Any] = field(default_factory=dict)
    stamps: Stamps = field(default_factory=dict)
    threads: int | None = None
    skipped: int = 0
    parent: ParentModel | None = None
    trained: Config | None = None
    parent_model: str | None = None


def starting_point(config: Config, facts: dict[str, Any], grid: Grid) -> Start:
    """Where this configuration starts. Every rank calls this.

    config: with its parent
    facts: those of `check_vocabulary`. UserError where `save` holds another run's checkpoint, or
    where the checkpoint to load is damaged or does not fit.
    """
    save = config.checkpoint.save
    path = checkpoint_to_continue(config)
    if save:
        _check_nothing_lost(Path(save), path, finetune=config.checkpoint.finetune)
    if path is None:
        return _new_run(config, facts, grid)
    path, seen = _undamaged(path, grid, fallback=config.checkpoint.load_fallback)
    trained, meta = read_meta(path)
    note_opened(path, meta)
    _check_same_model(config, trained, path)
    _check_same_text(facts, meta, path)
    _name_other_corpora(facts, meta)
    _check_batch(config, meta, grid, path)
    needs_state = not config.checkpoint.no_load_optim
    if needs_state and meta["step"] < config.training.train_iters:
        check_engine_state(path, meta)
    return Start(
        step=meta["step"],
        windows=meta.get("windows", _windows_before(trained, meta)),
        pending=tuple(meta.get("pending_losses", ())),
        path=path,
        written_by=Engine.of(trained, meta.get("ranks", grid.ranks)),
        record=meta,
        stamps=seen,
        threads=meta.get("threads"),
        skipped=meta.get("skipped", 0),
        trained=trained,
        parent_model=meta.get("parent_model"),
    )


def _new_run(config: Config, facts: dict[str, Any], grid: Grid) -> Start:
    """Step 0, with first values of its own or with the weights of a parent."""
    if config.checkpoint.parent.path is None:
        return Start()
    parent = parent_model(config, grid)
    _check_same_text(facts, parent.record, parent.path)
    return Start(parent=parent, parent_model=parent.description)


def _undamaged(path: Path, grid: Grid, *, fallback: bool) -> tuple[Path, Stamps]:
    """A verified checkpoint and the stamps of its files: this one, or with `fallback` another.

    Damaged on every rank where there is none. Each rank hashes its share of the files.
    """
    seen = stamps(path)
    faults = shared_file_faults(path, grid)
    if not faults:
        return path, seen
    good = newest_good(path, lambda other: _can_be_resumed(other, grid))
    damage = replaced(faults, good, f"load={good} or load_fallback=true takes it")
    if good is None or not fallback:
        raise damage
    logger.warning("%s; load_fallback: continuing from %s", "; ".join(damage.faults), good)
    return good, stamps(good)


def _can_be_resumed(path: Path, grid: Grid) -> bool:
    return not shared_file_faults(path, grid) and bool(engine_files(path, read_record(path)))


def _windows_before(trained: Config, meta: dict[str, Any]) -> int:
    """Windows used up to a checkpoint, where an old record does not say it."""
    training = trained.training
    micro_batches = training.gradient_accumulation_steps * meta.get("ranks", 1)
    return meta["step"] * training.train_micro_batch_size_per_gpu * micro_batches


def _check_nothing_lost(save: Path, path: Path | None, *, finetune: bool) -> None:
    """Refuse to start into a folder of checkpoints that the run does not continue."""
    step = latest_step(save)
    if step is None:
        return
    continues = path is not None and path.parent.resolve() == save.resolve()
    if not continues:
        of_another = " of another configuration than this fine-tuning" if finetune else ""
        cure = f"set load: {save} to continue it, or save elsewhere"
        raise UserError(
            f"save: {save} holds a checkpoint of step {step} already{of_another} - {cure}"
        )


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
    now, then = facts["tokenizer"], meta.get("tokenizer") or {}
    same = then.get("hash", now["hash"]) == now["hash"]  # an old record may not say it
    if same and facts["vocab"] == meta["vocab"]:
        return
    learned_with = f"{then['type']} {then['hash']}" if then else "a tokenizer that it does not name"
    raise UserError(
        f"load: {path} learned with {learned_with}"
        f" ({meta['vocab']} rows of vocabulary),"
        f" the data are written by {now['type']} {now['hash']} ({facts['vocab']} rows)"
        " - prepare them with that tokenizer"
    )


def _name_other_corpora(facts: dict[str, Any], meta: dict[str, Any]) -> None:
    """Log a change of the corpora of a blend, of their sizes or weights."""
    if facts.get("corpora") == meta.get("corpora"):
        return
    logger.warning(
        "continuing with other text: %s, was %s; text that was used may come again, and other text"
        " may be left out",
        *(_blend(facts), _blend(meta)),
    )


def _blend(facts: dict[str, Any]) -> str:
    """`github 0.667 of 23,524,707 tokens + arxiv 0.333 of …`, from a checkpoint's facts."""
    corpora = [
        f"{one['corpus']} {one['weight']:.3g} of {one['tokens']:,} tokens"
        for one in facts.get("corpora") or ()
    ]
    return " + ".join(corpora) or facts.get("corpus") or "one corpus"


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
