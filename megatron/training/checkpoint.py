"""Save a training and resume it: weights, configuration, and the engine's own state.

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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoints.manifest import (
    WEIGHTS,
    Damaged,
    Stamps,
    check_unchanged,
    engine_files,
)
from megatron.checkpoints.saved import folder_of, remove_unfinished, step_of, steps_in
from megatron.checkpoints.write import finish, unfinished, write_model
from megatron.errors import UserError
from megatron.files import remove
from megatron.training.optimizer import keeping_settings
from megatron.training.trainer import Trainer
from megatron.training.universal import Engine, give_weights, restore
from megatron.training.writing import Writing, writable

logger = logging.getLogger(__name__)

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
    partial = unfinished(folder, step)
    kept = _what_stays(folder)
    with writable(grid, partial, kept):
        if grid.first:
            remove_unfinished(folder)
            remove(partial)  # if only this cannot be removed, what it holds must not be mixed in
    writing = Writing(engine)
    weights = full_weights(engine, keep=grid.first)
    if grid.first:
        # First, so that they are hashed while the engine writes its larger files.
        write_model(partial, weights, trainer.config, writing.write)
    del weights
    writing.files_of_engine(folder, partial.name)
    files = writing.finished(grid, partial, kept)
    with writable(grid, partial, kept):
        if grid.first:
            finish(partial, step, trainer.config, facts, files)
    return folder_of(folder, step)


def _what_stays(folder: Path) -> str:
    steps = steps_in(folder)
    return f"{folder_of(folder, steps[-1])} stays" if steps else "there is no earlier checkpoint"


def check_engine_state(path: Path, record: dict[str, Any]) -> None:
    """UserError where a folder global_stepN has weights, but nothing to resume with."""
    if not engine_files(path, record):
        raise UserError(
            f"{path}: holds weights only, training cannot continue from it"
            " - finetune=true starts a new run from them, no_load_optim=true goes on with a fresh"
            " optimizer; a sweep keeps the optimizer's states with --keep-states"
        )


def resume_with_fresh_optimizer(trainer: Trainer, path: Path, before: Stamps) -> None:
    """Go on at the step of a folder global_stepN with its weights alone.

    before: stamps of the folder's files when they were verified
    UserError where the weights cannot be read or were changed meanwhile.
    """
    file = path / WEIGHTS
    try:
        with safe_open(file, framework="pt") as weights:
            give_weights(trainer.engine, trainer.config, weights.get_tensor)
    except (OSError, SafetensorError) as fault:
        raise Damaged([f"{file}: cannot be read ({fault})"]) from None
    check_unchanged(path, before)
    step = step_of(path)
    assert step is not None
    trainer.step = trainer.engine.global_steps = step
    trainer.restore_exact_positions()
    logger.info("no_load_optim: continuing at step %d with a fresh optimizer", step)


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


def _stage(of: Any, name: str) -> Any:
    """A stage of ZeRO, which Python 3.11.0 to 3.11.3 pickle as getattr(ZeroStageEnum, name).

    It stands in for getattr. UnpicklingError for all else.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if of is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"Weights only load refused getattr of {of!r}")
    return ZeroStageEnum[name]


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
        with torch.serialization.safe_globals([*classes, (_stage, "builtins.getattr")]):
            yield
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        if before is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
