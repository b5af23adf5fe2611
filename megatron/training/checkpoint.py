"""Checkpoints: float32 weights and the configuration, and the engine's own state for resuming.

SAVE/latest                                 name of the newest folder
SAVE/global_step100/model.safetensors       weights in float32, by our names
                    config.yml              the complete configuration
                    pos_emb_file.py         the text of the user's own encoding; never run from here
                    checkpoint.json         step, config_hash, vocab, tokenizer, corpus, commit,
                                            size and SHA-256 of every other file
                    mp_rank_*, *zero_*      DeepSpeed's engine state
"""

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.commit import commit
from megatron.config import Config, load
from megatron.config.user_file import COPY
from megatron.errors import UserError
from megatron.files import remove, write_text
from megatron.model import GPT, from_config
from megatron.training.fits import check_weights_fit
from megatron.training.manifest import (
    ENGINE_STATE,
    SETTINGS,
    WEIGHTS,
    Damaged,
    Stamps,
    check_unchanged,
    engine_files,
    faults_of,
    is_verifiable,
    note_if_old,
    read_record,
    verified,
    write_record,
)
from megatron.training.optimizer import keeping_settings
from megatron.training.saved import (
    chosen,
    folder_of,
    newest_good,
    remove_checkpoint,
    remove_unfinished,
    step_of,
    steps_in,
)
from megatron.training.trainer import Trainer
from megatron.training.universal import Engine, restore
from megatron.training.writing import Writing, writable

logger = logging.getLogger(__name__)

READ_BY_EVALUATION = (SETTINGS, COPY, WEIGHTS)
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)
"""What torch and DeepSpeed raise for files that are damaged, hostile or of another program."""


def save(trainer: Trainer, folder: Path, facts: dict[str, Any]) -> Path:
    """Write partial_step{step}, rename it to global_step{step}, then point `latest` at it.

    Every rank calls this. facts: entries of checkpoint.json beyond step, hash, commit and files
    UserError on every rank where a number to be saved is not finite or a file cannot be written.
    Then nothing of this step is left, and earlier checkpoints stay.
    """
    step, grid, engine = trainer.step, trainer.grid, trainer.engine
    final = folder_of(folder, step)
    partial = folder / f"partial_step{step}"
    kept = _what_stays(folder)
    with writable(grid, partial, kept):
        if grid.first:
            remove_unfinished(folder)
            remove(partial)  # if only this cannot be removed, what it holds must not be mixed in
    writing = Writing(engine)
    weights = full_weights(engine, keep=grid.first)
    if grid.first:
        # First, so that they are hashed while the engine writes its larger files.
        _write_own_files(partial, weights, trainer.config, writing)
    del weights
    writing.files_of_engine(folder, partial.name)
    files = writing.finished(grid, partial, kept)
    with writable(grid, partial, kept):
        if grid.first:
            record = {"step": step, "config_hash": trainer.config.hash, "commit": commit(), **facts}
            write_record(partial, {**record, "files": files})
            remove_checkpoint(final)
            partial.rename(final)
            write_text(folder / "latest", final.name)
    return final


def _what_stays(folder: Path) -> str:
    steps = steps_in(folder)
    return f"{folder_of(folder, steps[-1])} stays" if steps else "there is no earlier checkpoint"


def _write_own_files(
    partial: Path, weights: dict[str, Tensor], config: Config, writing: Writing
) -> None:
    """Write what evaluation reads."""

    def write_weights(file: Path) -> None:
        partial.mkdir(parents=True)
        save_file(weights, file)
        file.chmod(0o666 & ~_umask())  # safetensors lets only the owner read it

    writing.write(partial / WEIGHTS, write_weights)
    writing.write(partial / SETTINGS, config.save)
    if config.pos_emb_code is not None:
        writing.write(partial / COPY, lambda _: None)  # config.save wrote it


def check_engine_state(path: Path, record: dict[str, Any]) -> None:
    """UserError where a folder global_stepN has weights, but nothing to resume with."""
    if not engine_files(path, record):
        raise UserError(
            f"{path}: holds weights only, training cannot continue from it"
            " - a sweep removes the optimizer's states of a finished run:"
            " train anew, or sweep with --keep-states"
        )


def resume(trainer: Trainer, path: Path, written_by: Engine, before: Stamps) -> None:
    """Load the engine's state of a folder global_stepN; code that its pickles name is not run.

    written_by: the engine that wrote it; the state of another one than this is converted
    before: stamps of the folder's files when they were verified
    UserError where the state cannot be loaded, is of another step or was changed meanwhile.
    """
    now = Engine.of(trainer.config, trainer.grid.ranks)
    expected = int(path.name.removeprefix("global_step"))
    with _data_only():
        if written_by == now:
            loaded = _load_engine(trainer.engine, path)
        else:
            logger.info("%s was written with %s; continuing with %s", path, written_by, now)
            restore(trainer.engine, trainer.config, path, written_by)
            trainer.engine.global_steps = expected
            loaded = path
    check_unchanged(path, before)
    if loaded is None:
        raise UserError(f"{path}: has no engine state - only evaluation can use this checkpoint")
    step = trainer.engine.global_steps
    if step != expected:
        raise Damaged([f"{path}: the engine's state is that of step {step}"])
    trainer.step = expected
    trainer.restore_exact_positions()


def _load_engine(engine: Any, path: Path) -> Any:
    """What DeepSpeed's own loading returns; UserError where it fails."""
    try:
        with keeping_settings(engine):
            loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
    except torch.OutOfMemoryError:
        raise
    except UNREADABLE as fault:
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        raise UserError(
            f"{path}: the engine's state cannot be loaded ({reason:.200})"
            " - continue from another checkpoint"
        ) from fault
    return loaded


def keep_weights_only(folder: Path) -> None:
    """Delete the engine's state of every checkpoint in a run's folder; evaluation needs none.

    checkpoint.json stops listing the files before they go: whenever this is interrupted, what is
    listed is there. A checkpoint whose record is damaged is left as it is.
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
        states = engine_files(path, record)
        if is_verifiable(record) and states:
            files = {name: one for name, one in record["files"].items() if name not in states}
            write_record(path, {**record, "files": files})
        for state in path.glob(ENGINE_STATE):
            state.unlink()


def read_meta(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration and checkpoint.json of a folder global_stepN.

    UserError where they are damaged or disagree.
    """
    meta = read_record(path)
    step, config_hash, vocab = meta["step"], meta["config_hash"], meta["vocab"]
    with verified(path, SETTINGS, COPY):
        config = load([path / SETTINGS])
    if config.hash != config_hash:
        files = SETTINGS if config.pos_emb_code is None else f"{SETTINGS} with {COPY}"
        raise UserError(
            f"{path}/{files}: its hash is {config.hash}, the checkpoint says {config_hash}"
            " - it was edited after training"
        )
    logger.info("%s: step %d, %d rows of vocabulary, config %s", path, step, vocab, config_hash)
    return config, meta


def load_for_evaluation(
    folder: str | Path, step: int | None = None
) -> tuple[GPT, Config, dict[str, Any]]:
    """The trained model in float32 and eval mode, its configuration, and checkpoint.json.

    To the latter `path` is added, the folder global_stepN. UserError where there is no checkpoint,
    or where it does not hold the model that its configuration describes.
    """
    path = chosen(folder, step)
    try:
        config, meta = read_meta(path)
        note_if_old(path, meta)
        model = load_model(path, config, meta["vocab"])
    except Damaged as damage:
        raise _with_a_better_one(path, damage) from None
    return model, config, {**meta, "path": str(path)}


def _with_a_better_one(path: Path, damage: Damaged) -> Damaged:
    """The same fault, and the checkpoint of the run that could be evaluated instead."""
    good = newest_good(path, lambda other: not faults_of(other, READ_BY_EVALUATION))
    return replaced(damage.faults, good, f"--step {step_of(good)} takes it" if good else "")


def replaced(faults: list[str], good: Path | None, how: str) -> Damaged:
    """What is wrong with a checkpoint, and the newest good one of the run."""
    if good is None:
        return Damaged(faults, "no other checkpoint of the run is good: copy it again")
    return Damaged(faults, f"the newest good checkpoint of the run is {good}: {how}")


def load_model(path: Path, config: Config, vocab: int) -> GPT:
    """The model of a configuration with the weights of a folder global_stepN, in eval mode.

    UserError where the weights cannot be read, were changed or are those of another model.
    """
    check_weights_fit(config, vocab)
    file = path / WEIGHTS
    with verified(path, WEIGHTS):
        model = from_config(config, vocab=vocab)
        try:
            weights = load_file(file)
        except (OSError, SafetensorError) as fault:
            raise Damaged([f"{file}: cannot be read ({fault})"]) from None
        _check_float32(file, weights)
        try:
            model.load_state_dict(weights)
        except RuntimeError as fault:
            raise UserError(
                f"{file}: does not hold the model of its config.yml ({fault})"
            ) from None
    return model.eval()


def _check_float32(file: Path, weights: dict[str, Tensor]) -> None:
    """UserError for other numbers, which torch would convert without a word."""
    for name, weight in weights.items():
        if weight.dtype != torch.float32:
            kind = str(weight.dtype).removeprefix("torch.")
            raise UserError(f"{file}: {name} is {kind}, not float32 - copy the checkpoint again")


def full_weights(engine: Any, *, keep: bool = True) -> dict[str, Tensor]:
    """The whole model's weights in float32 on the CPU, from the optimizer's master copy if any.

    Every rank calls this, as with ZeRO each holds a part; ranks without `keep` get none.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else None
        if keep:
            weight = parameter if master is None else master
            weights[name] = weight.detach().float().cpu().contiguous()
    return weights


@contextmanager
def _data_only() -> Iterator[None]:
    """Let torch load plain data alone, and the few classes that DeepSpeed itself stores.

    DeepSpeed otherwise unpickles its files in full, which would run code that they name.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        if before is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
