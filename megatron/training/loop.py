"""The training loop: open, build, resume; then batch, step, log, validate, save."""

import contextlib
import hashlib
import logging
import math
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialized
from torch import Tensor
from torch.profiler import profile

from megatron.checkpoints.manifest import WEIGHTS
from megatron.checkpoints.saved import remove_unfinished, with_parent
from megatron.config import Config
from megatron.config.schema import Stage, plain
from megatron.data.parts import Part
from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from megatron.model import AttentionSettings, from_config
from megatron.parallel.context import context_of
from megatron.parallel.grid import Grid, owned_by_first, set_matmul_precision, shared_faults
from megatron.parallel.threads import count_parameters, use_threads
from megatron.training import checkpoint
from megatron.training.batches import Batches, length_of_step, open_text
from megatron.training.checkpoint import full_weights
from megatron.training.metrics import TrainingLog, peak_memory
from megatron.training.resume import resume
from megatron.training.start import (
    Start,
    give_parent,
    match_weights,
    starting_point,
    with_schedule,
)
from megatron.training.stop import Stop
from megatron.training.trainer import StepResult, Trainer

logger = logging.getLogger(__name__)

TRACED = 3  # the step after a start that `profile` records; in the first ones torch warms up


def train(config: Config, grid: Grid) -> Path | None:
    """Train as the configuration says, from its checkpoint if there is one.

    Returns the last checkpoint's folder, even if exit_interval or exit_duration ends the run early.
    After a signal the process exits with 128 + its number. Raises UserError if something doesn't
    fit, before the engine is built, or if a loss is not finite.
    """
    if config.precision.dtype == "fp16" and grid.device.type == "cpu":
        raise UserError("precision: fp16 needs a CUDA device - use bf16 or fp32 on the CPU")
    save_to = config.checkpoint.save
    owned = owned_folder(Path(save_to), "save") if save_to else contextlib.nullcontext()
    with owned_by_first(grid, owned):
        # Open the text, the checkpoint to continue from, the engine and the logs.
        if save_to and grid.first:
            remove_unfinished(Path(save_to))
        with shared_faults(grid):
            config = with_parent(config)
            grid = grid.sharing(config.parallel.context_parallel_size)
            config.check_batch(grid.data_ranks)
            parts, facts = open_text(config)
        start = starting_point(config, facts, grid)
        config = with_schedule(config, start)
        steps = config.training.train_iters
        saved = start.before.path if start.before else None
        is_ours = saved and save_to and saved.parent.resolve() == Path(save_to).resolve()
        if is_ours and is_due(start.step, config.evaluation.extrapolation_interval, steps):
            # Measure rows of this step that are missing after a kill or a stop.
            from megatron.evaluation.evaluate_checkpoint import evaluate, options_of_training

            evaluate(config, replace(options_of_training(config), checkpoint=str(saved)))
        if start.step >= steps:
            logger.info("step %d of %d: nothing left to train", start.step, steps)
            return saved
        run = Run(config, grid, parts, facts, start)
        trainer, losses, stop = run.trainer, run.losses, run.stop
        from tqdm.contrib.logging import logging_redirect_tqdm  # of the extra `train`

        with contextlib.closing(run.log), logging_redirect_tqdm(), stop:
            if start.before is None and checkpoint.is_saved(0, config.checkpoint):
                saved = run.save()
            peak_memory(grid.device)  # so that the first peak excludes the engine's start

            for step in range(start.step + 1, steps + 1):
                if stop.reason is not None:
                    break
                run.enter_stage(step)
                traced = config.logging.profile and grid.first and step == start.step + TRACED
                with run.trace() if traced else contextlib.nullcontext():
                    result = trainer.train_step(run.batches.next_step(length_of_step(config, step)))
                losses.add(step, result)
                run.log.bar.update()

                stops = step < steps and stop.due(step)
                last = stops or step == steps
                logs = last or step % config.logging.log_interval == 0
                saves = last or checkpoint.is_saved(step, config.checkpoint)
                validates = is_due(step, config.training.validation_interval, steps)

                if logs or validates or saves:
                    losses.check()
                if logs:
                    tokens = run.batches.used * config.model.seq_length
                    run.log.step(trainer, result, losses.take_mean(), {"tokens": tokens})
                if validates:
                    # Validate before saving: then a resumed run misses no validation, and no
                    # checkpoint is written if the validation loss is not finite.
                    run.validate()
                if saves or stops:
                    saved = run.save()
                if not stops:
                    run.extrapolate(step)
                    stops = stop.reason is not None
                    if stops and not saves:
                        saved = run.save()

        # Close, and say why the run ended early, even if only the last measurements are missing.
        if stop.reason is not None:
            reason, status = stop.reason
            outcome = f"saved {saved}; load={saved} continues it"
            if saved is None:
                outcome = "nothing was saved, because save is not set"
            logger.warning(f"stopped at step {trainer.step} of {steps} ({reason}), {outcome}")
            if status:
                sys.exit(status)
        return saved


def is_due(step: int, interval: int, steps: int) -> bool:
    """Whether a measurement is due at a step: every `interval` steps and at the last; 0: never."""
    return bool(step and interval) and (step == steps or step % interval == 0)


class Run:
    """An open training run: its engine, text, checkpoints and logs.

    parts, facts: from `open_text`. Every rank calls each method at the same step.
    Raises UserError if the model doesn't fit into memory or a file cannot be written.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        parts: Mapping[str, Part],
        facts: dict[str, Any],
        start: Start,
    ) -> None:
        self.config, self.grid, self.facts = config, grid, facts
        training, settings, record = config.training, config.logging, start.record
        if config.checkpoint.parent.path is not None:
            facts["parent"] = plain(config.checkpoint.parent)
            facts["parent_model"] = start.parent_model
        if "wandb" in record or settings.use_wandb:
            facts["wandb"] = record.get("wandb") or secrets.token_hex(4)
        vocab = facts["vocab"]
        model = from_config(config, vocab, facts["tokenizer"].get("eod"))
        self.batches = Batches(config, grid, parts, start.windows, start.planned)
        if training.validation_interval:  # fail now if validation is impossible
            window = torch.zeros(1, config.data.seq_length_val, config.model.hidden_size)
            model.position.on_embeddings(window)
            self.batches.validation()
        count, in_encoding = count_parameters(model), count_parameters(model.positions)
        use_threads(count, grid.device, before=record.get("threads"))
        precision = config.precision
        set_matmul_precision(precision.float32_matmul_precision, precision.dtype, grid.device)
        sources = {}
        if start.parent is not None:
            sources = match_weights(start.parent, model, start.parent_model)
        self.trainer = trainer = Trainer(config, model, grid)
        logger.info(
            f"{config.label}: {count:,} parameters, {in_encoding:,} of them in the encoding;"
            f" vocabulary of {vocab} rows; config {config.hash}"
        )
        logger.info(
            f"{grid.ranks} rank(s) on {grid.device.type}, {config.precision.dtype},"
            f" attention {trainer.model.attention_choice}"
        )
        if start.parent is not None:
            give_parent(trainer, start.parent, sources)
        if start.before is not None:
            resume(trainer, start.before.path, start.before.record)
        trainer.restore_exact_positions()
        self.stage: Stage | None = None
        self.context = context_of(grid, "all_gather")  # for rows measured during training
        if config.evaluation.extrapolation_interval:
            from megatron.evaluation.evaluate_checkpoint import check_training  # needs `train`

            with shared_faults(grid):
                check_training(config)

        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        log_folder = Path(settings.log_dir) if settings.log_dir else self.folder
        self.losses = Losses(config, grid, record)
        with shared_faults(grid):
            self.log = TrainingLog(config, grid, log_folder, vocab, start.record, facts)
        self.stop = Stop(grid, steps=training.exit_interval, minutes=training.exit_duration)
        self.log_folder = log_folder or Path()

    def enter_stage(self, step: int) -> None:
        """Before a step, give the model the settings of the step's stage."""
        stage = self.config.training.stage_of(step)
        if stage is self.stage:
            return
        self.stage = stage
        attention = AttentionSettings.of(self.config.at_step(step).attention)
        self.trainer.model.use_attention(attention, stage and stage.pos_emb_args)
        logger.info(f"from step {step} on: {plain(stage) if stage else 'as configured'}")

    def save(self) -> Path | None:
        """The folder of this step's checkpoint, or None if `save` is not set."""
        if self.folder is None:
            return None
        record = self.facts | self.batches.record() | self.losses.record()
        record |= {"ranks": self.grid.ranks, "data_ranks": self.grid.data_ranks}
        record["threads"] = torch.get_num_threads()
        with self.log.paused():
            path = checkpoint.save(self.trainer, self.folder, record)
            if self.grid.first:
                checkpoint.delete_older(self.folder, self.trainer.step, self.config.checkpoint)
        logger.info("saved %s", path)
        return path

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Profile the block; the trace is written to the run's folder."""
        path = self.log_folder / "profile.json.gz"
        with profile(record_shapes=True, profile_memory=True) as profiler:
            yield
        profiler.export_chrome_trace(str(path))
        logger.info(f"profile: {path}; open it in https://ui.perfetto.dev")

    def extrapolate(self, step: int) -> None:
        """Write evaluate.py's rows for these weights if they are due; existing rows are kept."""
        interval = self.config.evaluation.extrapolation_interval
        if not is_due(step, interval, self.config.training.train_iters):
            return
        from megatron.evaluation.evaluate_checkpoint import evaluate_training

        weights = full_weights(self.trainer)
        digest = hashlib.sha256(serialized(weights)).hexdigest() if self.grid.first else ""
        record = (
            self.facts | self.batches.record() | {"step": step, "config_hash": self.config.hash}
        )
        record["files"] = {WEIGHTS: {"sha256": self.grid.gather(digest)[0]}}
        with self.log.paused():
            evaluate_training(
                self.config, weights, record, self.grid, self.context, stops=self.stop.due
            )

    def validate(self) -> None:
        """Measure and log the validation loss. Raises UserError if it is not finite."""
        step = self.trainer.step
        with self.log.paused():
            loss = self.trainer.validate(self.batches.validation(), self.config.training.eval_iters)
        if not math.isfinite(loss):
            raise UserError(
                f"validation: the loss is {loss} at step {step}, so no checkpoint is saved for this"
                f" step - {checkpoint.CURE}"
            )
        self.log.validation(step, loss)


class Losses:
    """Losses since the last log line, and the check that they are finite.

    Every rank calls each method at the same step. record: checkpoint.json of the start; it holds
    mean losses that were not logged yet
    """

    def __init__(self, config: Config, grid: Grid, record: Mapping[str, Any]) -> None:
        self.config, self.grid = config, grid
        pending = record.get("pending_losses", ())
        self.means = [torch.tensor(loss, device=grid.device) for loss in pending]
        self.unchecked: list[tuple[int, Tensor]] = []  # steps, and [loss, norm] of this rank

    def record(self) -> dict[str, Any]:
        """Entries of checkpoint.json."""
        return {"pending_losses": [loss.item() for loss in self.means]}

    def add(self, step: int, result: StepResult) -> None:
        norm = result.grad_norm
        if norm is None or self.config.precision.dtype == "fp16":
            norm = 0.0  # in fp16 an infinite norm may only mean that the loss scale was too large
        if not isinstance(norm, Tensor):
            # Filled on the device, because a copy from the host would wait for it.
            norm = torch.full((), norm, device=self.grid.device)
        numbers = torch.stack([result.loss.float(), norm.float()])
        self.unchecked.append((step, numbers))

    def check(self) -> None:
        """Average the losses since the last check over all ranks.

        Raises UserError if a loss or a norm of any rank is not finite. Only here do the ranks wait
        for each other, and the host for the device.
        """
        if not self.unchecked:
            return
        numbers = torch.stack([numbers for _, numbers in self.unchecked])
        means = self.grid.mean(numbers)  # [steps, 2]
        if not means.isfinite().all():
            for (step, _), (loss, norm) in zip(self.unchecked, means.tolist(), strict=True):
                if not math.isfinite(loss + norm):
                    raise UserError(
                        f"loss: {loss}, gradient norm {norm} at step {step} - {checkpoint.CURE}"
                    )
        self.means += list(means[:, 0])
        self.unchecked.clear()

    def take_mean(self) -> float:
        """The mean since the last log line."""
        mean = torch.stack(self.means).mean().item()
        self.means.clear()
        return mean
