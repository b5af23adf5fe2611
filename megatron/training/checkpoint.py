"""Save a training, and keep the checkpoints that are needed.

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
import shutil
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron.checkpoints.manifest import Entries
from megatron.checkpoints.saved import folder_of, remove_checkpoint, remove_unfinished, steps_in
from megatron.checkpoints.write import finish, synced, unfinished, write_model
from megatron.config.schema import Checkpoint
from megatron.errors import UserError, in_words
from megatron.files import remove
from megatron.training.trainer import Trainer

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
    earlier = f"{folder_of(folder, steps[-1])} stays" if steps else "there is no earlier checkpoint"

    names = next(filter(None, grid.gather(not_finite(engine))), None)
    if names:
        raise UserError(
            f"save: not finite after step {step}: {', '.join(names[:SHOWN])} - nothing was saved,"
            f" {earlier}; {CURE}"
        )

    @contextmanager
    def by_all_or_none() -> Iterator[None]:
        """A fault of any rank ends all, so that none waits for it."""
        reason = None
        try:
            yield
        except FAULTS as fault:
            reason = in_words(fault)
        reason = next(filter(None, grid.gather(reason)), None)
        if reason is None:
            return
        free = shutil.disk_usage(folder).free / 2**30
        if grid.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"save: {partial} cannot be written ({reason}; {free:.2f} GiB were free) - make room"
            f" or save elsewhere; {earlier}"
        )

    weights = full_weights(trainer, keep=grid.first)
    files: list[Path] = []
    with by_all_or_none():
        if grid.first:
            remove_unfinished(folder)
            remove(partial)  # if only this cannot be removed, what it holds must not be mixed in
            write_model(partial, weights, trainer.config)
            files += partial.iterdir()
    del weights

    faults: list[Exception] = []

    def write_state(state_dict: Any, path: str) -> None:
        # A rank that raised at once would leave the other ones waiting inside the engine.
        files.append(Path(path))
        try:
            torch.save(state_dict, path)
        except FAULTS as fault:
            faults.append(fault)

    writer = engine.checkpoint_engine
    writer.save = write_state
    engine._copy_recovery_script = lambda folder: None
    entries: Entries = {}
    with by_all_or_none():
        try:
            engine.save_checkpoint(str(folder), tag=partial.name, save_latest=False)
        finally:  # their classes have these too
            del writer.save, engine._copy_recovery_script
        if faults:
            raise faults[0]
        entries = synced(files)

    entries_of_ranks = grid.gather(entries)
    with by_all_or_none():
        if grid.first:
            entries = dict(ChainMap(*entries_of_ranks))
            finish(partial, step, trainer.config, facts, entries)
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
        weight = parameter if master is None else master
        if keep:
            weights[name] = weight.detach().float().cpu().contiguous()
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


# --- which ones stay ------------------------------------------------------------------------------


class Keeper:
    """Follows a run's losses, and deletes checkpoints that are not needed.

    A loss is computed from the weights of the step before. So a checkpoint is proven good once a
    loss after it is no worse than usual. Without this rule a run that explodes would delete its
    last good weights.

    folder: of the run, or None to save nothing; record: checkpoint.json of the step that the run
    continues, {} for a new run; deletes: whether this rank does
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Checkpoint,
        record: Mapping[str, Any],
        *,
        deletes: bool = True,
    ) -> None:
        self.folder, self.settings, self.deletes = folder, settings, deletes
        self.saved: int | None = record.get("step")
        self.proven: int | None = record.get("proven")
        self.usual_loss: float | None = record.get("usual_loss")
        if self.usual_loss is None and "vocab" in record:
            self.usual_loss = math.log(record["vocab"])  # by guessing, which is no explosion

    def follow(self, losses: Sequence[tuple[int, float]]) -> None:
        """Steps and their finite losses, each once; deletes what a proof made needless."""
        before = self.proven
        for step, loss in losses:
            usual = loss if self.usual_loss is None else self.usual_loss
            if loss <= usual + EXPLODED:
                self.usual_loss = usual + FOLLOWS * (loss - usual)
                if self.saved is not None and self.saved < step:
                    self.proven = self.saved
            elif self.saved == step - 1:
                logger.warning(
                    f"step {step}: loss {loss:.4g} after {usual:.4g}: global_step{self.saved}"
                    " follows an exploded update, the checkpoint before it is kept too"
                )
        if self.proven != before:
            self.clean()

    def record(self) -> dict[str, Any]:
        """Entries of checkpoint.json."""
        return {"proven": self.proven, "usual_loss": self.usual_loss}

    def save(self, trainer: Trainer, facts: dict[str, Any]) -> Path | None:
        """Write a checkpoint, and delete those that are needless then. Every rank calls this."""
        if self.folder is None:
            return None
        path = save(trainer, self.folder, facts | self.record())
        self.wrote(trainer.step)
        logger.info("saved %s", path)
        return path

    def wrote(self, step: int) -> None:
        """A checkpoint of this step was written."""
        self.saved = step
        self.clean()

    def clean(self) -> None:
        """Delete all but the newest keep_last_n_checkpoints up to the last one written.

        The newest proven one stays, those of extra_save_iters, and all while none is proven.
        """
        count = self.settings.keep_last_n_checkpoints
        if self.folder is None or self.saved is None or self.proven is None:
            return
        if not (count and self.deletes):
            return
        stay = self.settings.extra_save_iters
        steps = [step for step in steps_in(self.folder) if step <= self.saved and step not in stay]
        for step in steps[:-count]:
            if step == self.proven:
                continue
            path = folder_of(self.folder, step)
            try:
                remove_checkpoint(path)
            except OSError as fault:  # one that stays is no reason to end a run
                logger.warning("%s: cannot be deleted (%s)", path, fault.strerror)
