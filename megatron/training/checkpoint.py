"""Save a training, and keep the checkpoints that are needed.

SAVE/latest                                 name of the newest folder
SAVE/global_step100/model.safetensors       weights in float32, by our names
                    config.yml              the complete configuration
                    pos_emb_file.py         the text of the user's own encoding; never run from here
                    checkpoint.json         step, config_hash, vocab, tokenizer, corpus, commit,
                                            size and SHA-256 of every other file
                    optimizer.safetensors   the optimizer's state, for resuming; see `full_state`
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.checkpoints.saved import folder_of, remove_checkpoint, remove_unfinished, steps_in
from megatron.checkpoints.write import write_checkpoint
from megatron.config.schema import Checkpoint
from megatron.errors import UserError
from megatron.parallel.grid import shared_faults
from megatron.training.optimizer import PROGRESS_OF_SCALE, averages_of
from megatron.training.trainer import Trainer

logger = logging.getLogger(__name__)

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
    step, grid = trainer.step, trainer.grid
    steps = steps_in(folder)
    earlier = f"{folder_of(folder, steps[-1])} stays" if steps else "there is no earlier checkpoint"

    weights = full_weights(trainer, keep=grid.first)
    optimizer = full_state(trainer, keep=grid.first)
    with shared_faults(grid):
        if grid.first:
            names = not_finite({**weights, **optimizer})
            if names:
                raise UserError(
                    f"save: not finite after step {step}: {', '.join(names[:SHOWN])} - nothing was"
                    f" saved, {earlier}; {CURE}"
                )
            remove_unfinished(folder)
            try:
                write_checkpoint(folder, step, weights, trainer.config, facts, optimizer)
            except UserError as fault:
                raise UserError(f"save: {fault}; {earlier}") from None
    return folder_of(folder, step)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    # Least and largest show it, at an eighth of a norm's time.
    return [
        name
        for name, tensor in tensors.items()
        if not torch.stack(torch.aminmax(tensor)).isfinite().all()
    ]


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


def full_state(trainer: Trainer, *, keep: bool = True) -> dict[str, Tensor]:
    """The optimizer's state by names that fit every number of ranks, ZeRO stage and precision.

    exp_avg.NAME: an average of the whole weight of that name, float32, on the CPU
    step: Adam's updates; before the first one there are no averages
    loss_scale: where the dynamic one of fp16 stands

    Every rank calls this; ranks without `keep` get no averages.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    engine, optimizer = trainer.engine, trainer.optimizer
    # Torch counts in the state, apex in the groups.
    counters = [*optimizer.state.values(), *optimizer.param_groups]
    step = max((float(counter["step"]) for counter in counters if "step" in counter), default=0.0)
    state = {"step": torch.tensor(step)}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        scale = [getattr(scaler, name) for name in PROGRESS_OF_SCALE]
        state["loss_scale"] = torch.tensor(scale, dtype=torch.float64)
    if not step:
        return state
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed links the averages once, when only the first group has some.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    keys = averages_of(trainer.model, trainer.config.optimizer)
    for name, parameter in engine.module.named_parameters():
        for key in keys[name]:
            if engine.zero_optimization():
                average = cast(Tensor, safe_get_full_optimizer_state(parameter, key))
            else:  # it has none where there was never a gradient
                average = optimizer.state.get(parameter, {}).get(key, torch.zeros_like(parameter))
            if keep:
                state[f"{key}.{name}"] = average.detach().cpu().contiguous()
    return state


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
