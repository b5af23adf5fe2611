"""Save a training, resume it, and keep the checkpoints that are needed.

SAVE/latest                                 name of the newest folder
SAVE/global_step100/model.safetensors       weights in float32, by our names
                    config.yml              the complete configuration
                    pos_emb_file.py         the text of the user's own encoding; never run from here
                    checkpoint.json         step, config_hash, vocab, tokenizer, corpus, commit,
                                            size and SHA-256 of every other file
                    mp_rank_*, *zero_*      DeepSpeed's engine state
"""

import logging
import math
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoints.manifest import WEIGHTS, Damaged, Entries
from megatron.checkpoints.saved import (
    folder_of,
    remove_checkpoint,
    remove_unfinished,
    step_of,
    steps_in,
)
from megatron.checkpoints.write import finish, synced, unfinished, write_model
from megatron.config.schema import Checkpoint
from megatron.errors import UserError, in_words
from megatron.files import remove
from megatron.training.optimizer import keeping_settings
from megatron.training.trainer import Trainer
from megatron.training.universal import Engine, check_averages, give, restore

logger = logging.getLogger(__name__)

FAULTS = (OSError, RuntimeError, SafetensorError)  # of torch.save and save_file on a full disk
CURE = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
SHOWN = 3  # names in a message
EXPLODED = 1.0  # nats above the usual loss: e times the perplexity
FOLLOWS = 0.1  # weight of a loss in the usual one


def save(trainer: Trainer, folder: Path, facts: dict[str, Any]) -> Path:
    """Write partial_step{step}, rename it to global_step{step}, then point `latest` at it.

    Every rank calls this. facts: entries of checkpoint.json beyond step, hash, commit and files
    Raises UserError on every rank if a number to be saved is not finite or a file cannot be
    written. Then nothing of this step is left, and earlier checkpoints stay.
    """
    step, grid, engine = trainer.step, trainer.grid, trainer.engine
    partial = unfinished(folder, step)
    steps = steps_in(folder)
    kept = f"{folder_of(folder, steps[-1])} stays" if steps else "there is no earlier checkpoint"

    names = next(filter(None, grid.gather(not_finite(engine))), None)
    if names:
        raise UserError(
            f"save: not finite after step {step}: {', '.join(names[:SHOWN])} - nothing was saved,"
            f" {kept}; {CURE}"
        )

    # A rank that raised at once would leave the others waiting inside the engine. So a fault is
    # kept until all ranks have come to the same place.
    faults: list[Exception] = []

    @contextmanager
    def keeping_faults() -> Iterator[None]:
        try:
            yield
        except FAULTS as fault:
            faults.append(fault)

    def check_faults() -> None:
        reasons = grid.gather(in_words(faults[0]) if faults else None)
        reason = next(filter(None, reasons), None)
        if reason is None:
            return
        free = shutil.disk_usage(folder).free / 2**30
        if grid.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"save: {partial} cannot be written ({reason}; {free:.2f} GiB were free) - make room"
            f" or save elsewhere; {kept}"
        )

    with keeping_faults():
        if grid.first:
            remove_unfinished(folder)
            remove(partial)  # if only this cannot be removed, what it holds must not be mixed in
    check_faults()

    weights = full_weights(trainer, keep=grid.first)
    files: list[Path] = []
    with keeping_faults():
        if grid.first:
            write_model(partial, weights, trainer.config)
            files += partial.iterdir()
    del weights

    def write_state(state_dict: Any, path: str) -> None:
        files.append(Path(path))
        if not faults:
            with keeping_faults():
                torch.save(state_dict, path)

    writer = engine.checkpoint_engine
    writer.save = write_state
    engine._copy_recovery_script = lambda folder: None
    try:
        with keeping_faults():
            engine.save_checkpoint(str(folder), tag=partial.name, save_latest=False)
    finally:  # their classes have these too
        del writer.save, engine._copy_recovery_script
    entries: Entries = {}
    if not faults:
        with keeping_faults():
            entries = synced(files)
    check_faults()

    everyones = grid.gather(entries)
    with keeping_faults():
        if grid.first:
            together = {name: entry for own in everyones for name, entry in own.items()}
            finish(partial, step, trainer.config, facts, together)
    check_faults()
    return folder_of(folder, step)


def not_finite(engine: Any) -> list[str]:
    """Names of what this rank saves that holds NaN or infinity.

    Weights have their names; ZeRO has flat parts of all weights, which have numbers.
    """
    tensors = dict(engine.module.named_parameters())
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # the engine wraps torch's own
        optimizer = optimizer.optimizer
    for number, (master, state) in enumerate(optimizer.state.items()):
        for name, value in {"master weights": master, **state}.items():
            tensors[f"{name} {number}"] = value
    names = []
    for name, tensor in tensors.items():
        # Least and largest show it, at an eighth of a norm's time.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
            names.append(name)
    return names


def full_weights(trainer: Trainer, *, keep: bool = True) -> dict[str, Tensor]:
    """The whole model's weights in float32 on the CPU, from the optimizer's master copy if any.

    Every rank calls this, as with ZeRO each holds a part; ranks without `keep` get none.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    engine = trainer.engine
    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else None
        part = parameter if master is None else master
        weight = trainer.tensor.whole(name, part.detach())
        if keep:
            weights[name] = weight.float().cpu().contiguous()
    return weights


def is_saved(step: int, settings: Checkpoint) -> bool:
    """Whether a checkpoint is due after this step."""
    if step in settings.extra_save_iters:
        return True
    interval = settings.save_interval
    if not interval or not step:
        return False
    if settings.checkpoint_scale == "linear":
        return step % interval == 0
    power = 1
    while power < step:
        power *= interval
    return power == step


# --- resuming -------------------------------------------------------------------------------------


def resume(trainer: Trainer, path: Path, written_by: Engine, *, updates: int = 1) -> None:
    """Load the engine's state of a folder global_stepN; code that its pickles name is not run.

    written_by: the engine that wrote it; the state of another one than this is converted
    updates: steps that changed the weights; before the first, an optimizer has no averages
    Raises UserError if the state cannot be loaded or is of another step, or if its weights are not
    those of model.safetensors.
    """
    engine, step = trainer.engine, step_of(path)
    assert step is not None
    now = Engine.of(trainer.config, trainer.grid.ranks)
    if trainer.config.checkpoint.no_load_optim:
        with safe_open(path / WEIGHTS, framework="pt") as weights:
            give(trainer, weights.get_tensor)
        engine.global_steps = step
        logger.info("no_load_optim: continuing at step %d with a fresh optimizer", step)
    else:
        try:
            with _data_only(), keeping_settings(engine):
                if written_by == now:
                    engine.load_checkpoint(str(path.parent), tag=path.name)
                    if updates > 0:
                        check_averages(engine)
                    check_weights(trainer, path)
                else:
                    logger.info("%s was written with %s; continuing with %s", path, written_by, now)
                    restore(trainer, path, written_by)
                    engine.global_steps = step
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # torch and DeepSpeed have many for damaged or hostile files
            raise UserError(
                f"{path}: the engine's state cannot be loaded ({in_words(fault):.200})"
                " - copy the checkpoint again, or continue from another one"
            ) from fault
    if engine.global_steps != step:
        raise Damaged([f"{path}: the engine's state is that of step {engine.global_steps}"])
    trainer.step = step
    trainer.restore_exact_positions()


def check_weights(trainer: Trainer, path: Path) -> None:
    """Raises ValueError if an engine's weights are not those that evaluation reads.

    Every rank calls this.
    """
    weights = full_weights(trainer, keep=trainer.grid.first)
    if trainer.grid.first:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            for name, weight in weights.items():
                if not torch.equal(weight, file.get_tensor(name)):
                    raise ValueError(f"{name} is another one than in {WEIGHTS}")


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


# --- which ones stay ------------------------------------------------------------------------------


class Keeper:
    """Follows a run's losses, and deletes checkpoints that are not needed.

    A loss is computed from the weights of the step before. So a checkpoint is proven good once a
    loss after it is no worse than usual. Without this rule a run that explodes would delete its
    last good weights.

    folder: of the run, or None to delete nothing; started_at: the step that the run continues, or
    None; record: checkpoint.json of that step
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Checkpoint,
        *,
        started_at: int | None,
        record: dict[str, Any],
    ) -> None:
        self.folder, self.settings = folder, settings
        self.saved = started_at
        # What the next checkpoint's record must remember.
        self.facts = {key: record.get(key) for key in ("proven", "usual_loss")}
        if self.facts["usual_loss"] is None and "vocab" in record:
            # That of guessing, which is no explosion.
            self.facts["usual_loss"] = math.log(record["vocab"])

    def follow(self, losses: Sequence[tuple[int, float]]) -> None:
        """Steps and their finite losses, each once; deletes what a proof made needless."""
        facts, before = self.facts, self.facts["proven"]
        for step, loss in losses:
            usual = loss if facts["usual_loss"] is None else facts["usual_loss"]
            if loss <= usual + EXPLODED:
                facts["usual_loss"] = usual + FOLLOWS * (loss - usual)
                if self.saved is not None and self.saved < step:
                    facts["proven"] = self.saved
            elif self.saved == step - 1:
                logger.warning(
                    f"step {step}: loss {loss:.4g} after {usual:.4g}: global_step{self.saved}"
                    " follows an exploded update, the checkpoint before it is kept too"
                )
        if facts["proven"] != before:
            self.clean()

    def wrote(self, step: int) -> None:
        """A checkpoint of this step was written."""
        self.saved = step
        self.clean()

    def clean(self) -> None:
        """Delete all but the newest keep_last_n_checkpoints up to the last one written.

        The newest proven one stays, those of extra_save_iters, and all while none is proven.
        """
        count, proven = self.settings.keep_last_n_checkpoints, self.facts["proven"]
        if self.folder is None or not count or self.saved is None or proven is None:
            return
        stay = self.settings.extra_save_iters
        steps = [one for one in steps_in(self.folder) if one <= self.saved and one not in stay]
        for step in steps[:-count]:
            if step == proven:
                continue
            path = folder_of(self.folder, step)
            try:
                remove_checkpoint(path)
            except OSError as fault:  # one that stays is no reason to end a run
                logger.warning("%s: cannot be deleted (%s)", path, fault.strerror)
