"""The training loop: data -> trainer -> metrics, validations and checkpoints."""

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoints.keep import Keeper
from megatron.checkpoints.parent import with_parent
from megatron.config import Config
from megatron.config.load import DATA_PATHS
from megatron.config.schema import plain
from megatron.data.parts import Part, open_parts
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.parallel.grid import Grid
from megatron.parallel.owned import owned_by_first, shared_faults
from megatron.parallel.threads import count_parameters, local_processes, use_threads
from megatron.parallel.watchdog import Watchdog
from megatron.positions.layers import name_of_layers
from megatron.training import checkpoint
from megatron.training.continued import with_schedule
from megatron.training.deterministic import naming_operations
from megatron.training.epochs import with_epochs
from megatron.training.finetune import Heritage, with_rows_of_parent
from megatron.training.fits import check_fits, warn_if_tight
from megatron.training.folders import folders_of
from megatron.training.metrics import Metrics, Progress
from megatron.training.noise_scale import NoiseScale
from megatron.training.profiling import Profiling
from megatron.training.saves import is_saved
from megatron.training.start import Start, starting_point
from megatron.training.stop import Stop
from megatron.training.text import Text, lost_worker
from megatron.training.throughput import (
    Throughput,
    flops_per_token,
    peak_memory,
    peak_tflops,
    speed_text,
)
from megatron.training.trainer import Trainer
from megatron.training.vocabulary import check_vocabulary
from megatron.training.watch import Watch
from megatron.training.weights_and_biases import new_id

logger = logging.getLogger(__name__)

SHOWN = 4  # learned numbers of the encoding in a line of the console
STATE_BYTES = 16  # of a parameter in a checkpoint, with the optimizer's state
SLOW_DISK = 100e6  # bytes per second, until a save has been measured


def train(config: Config, grid: Grid) -> Path | None:
    """Train as the configuration says, from its checkpoint if there is one.

    Returns the last checkpoint's folder. Everything that can be refused is refused before the
    engine is built. The first rank owns the folders that are written.
    """
    with owned_by_first(grid, *folders_of(config)):
        with shared_faults(grid):
            config = with_parent(config)
        return _train(config, grid)


def _train(config: Config, grid: Grid) -> Path | None:
    config.check_batch(grid.ranks)
    here = {"ranks_here": local_processes(), "device": grid.device}
    with shared_faults(grid):
        parts = _opened(config)
        config = with_epochs(config, parts["train"], grid.ranks)
        files = [tokens for part in parts.values() for tokens in part.files]
        facts = with_rows_of_parent(config, check_vocabulary(config, files))
        facts |= _facts_of_text(parts["train"])
        end = _end_of_document(config, files, facts["tokenizer"].get("eod"))
        need = check_fits(config, facts["vocab"], ranks=grid.ranks, **here, disk=grid.first)
    start = starting_point(config, facts, grid)
    config = with_schedule(config, start.trained, start.step)
    if config.checkpoint.parent.path is not None:
        facts["parent"] = plain(config.checkpoint.parent)
        facts["parent_model"] = start.parent_model
    logger.info(f"{need.parameters.whole:,} parameters: {need}")
    warn_if_tight(config, need, **here)
    model = from_config(config, facts["vocab"], end)
    if config.training.eval_interval:
        _check_validation_length(model, config)
    run = Run(config, grid, parts, facts, start)
    deterministic = config.training.deterministic
    use_threads(
        count_parameters(model), grid.device, before=start.threads, by_load=not deterministic
    )
    heritage = Heritage(start.parent, model) if start.parent is not None else None
    with naming_operations():
        trainer = Trainer(config, model, grid)
        if heritage is not None:
            heritage.log()
            heritage.give(trainer)
        return run.to_the_end(trainer)


def _opened(config: Config) -> dict[str, Part]:
    """The text of the training, and of its validations where it has any."""
    training = config.training
    names = ["train"]
    if training.eval_interval and training.eval_iters:
        names.append("valid")
    with config.naming_places(*DATA_PATHS):
        return open_parts(config.data, names)


def _end_of_document(config: Config, files: Sequence[TokenFile], end: int | None) -> int | None:
    """The tokenizer's end of a document; UserError where a key needs it and the text lacks it."""
    for key in ("reset_attention_mask", "eod_mask_loss"):
        if config[key]:
            for tokens in files:
                tokens.check_ends(key, end)
    return end


def _facts_of_text(part: Part) -> dict[str, Any]:
    """What a checkpoint says about the text that it learned from."""
    if not part.weights:
        return {"corpus": part.files[0].meta.get("corpus")}
    return {"corpus": part.names, "corpora": part.facts()}


class Run:
    """What surrounds a trainer: its data, metrics and checkpoints.

    UserError where the data do not suffice.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        parts: Mapping[str, Part],
        facts: dict[str, Any],
        start: Start,
    ) -> None:
        self.config = config
        self.grid = grid
        self.facts = facts
        self.start = start
        self.watchdog = Watchdog(grid, config.parallel.hang_timeout)
        training = config.training
        self.steps = training.train_iters

        peak = config.logging.peak_theoretical_tflops
        peak = peak or peak_tflops(grid.device, config.precision.dtype)
        linear, attention = flops_per_token(config.model, facts["vocab"])
        self.throughput = Throughput(linear, attention, peak)

        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        if "wandb" in start.record or config.logging.use_wandb:
            self.facts["wandb"] = start.record.get("wandb") or new_id()
        self.text = Text(config, grid, parts, start.windows)
        self.keeper = self._keeper()
        self.validates = bool(training.eval_interval and training.eval_iters)
        if self.validates:
            self.text.validation()

    def to_the_end(self, trainer: Trainer) -> Path | None:
        """Train up to train_iters with log lines, checkpoints and validations.

        Returns the last checkpoint's folder, also where exit_interval or exit_duration ends the run
        early. A signal ends the process with 128 + its number. UserError where a loss is not
        finite, or where a process that reads samples is lost.
        """
        self._log_start(trainer)
        if self.start.step >= self.steps:
            logger.info("step %d of %d: nothing left to train", self.start.step, self.steps)
            return self.start.path
        start = self.start
        if start.path is not None and self.config.checkpoint.no_load_optim:
            checkpoint.resume_with_fresh_optimizer(trainer, start.path, start.stamps)
        elif start.path is not None and start.written_by is not None:
            checkpoint.resume(trainer, start.path, start.written_by, start.stamps)
        trainer.noise = self._noise_scale()
        metrics = self._metrics(trainer.step)
        try:
            saved, stop = self._until_stopped(trainer, metrics)
        except RuntimeError as fault:
            raise lost_worker(fault) or fault from None
        finally:
            if metrics is not None:
                metrics.close()
        if stop.reason is not None and trainer.step < self.steps:
            words, status = stop.reason
            if saved is None:
                outcome = "nothing was saved, for save is not set"
            else:
                outcome = f"saved {saved}; load={saved} continues it"
            logger.warning(f"stopped at step {trainer.step} of {self.steps} ({words}), {outcome}")
            if status:
                sys.exit(status)
        return saved

    def _until_stopped(self, trainer: Trainer, metrics: Metrics | None) -> tuple[Path | None, Stop]:
        whole, _ = trainer.parameter_counts()
        stop = Stop(
            self.grid,
            steps=self.config.training.exit_interval,
            minutes=self.config.training.exit_duration,
            saving=whole * STATE_BYTES / SLOW_DISK,
        )
        profiling = Profiling(
            self.config.logging,
            self._folder_of_logs,
            self.grid,
            done=trainer.step,
            steps=self.steps,
        )
        with stop, self.watchdog, profiling:
            return self._steps(trainer, metrics, stop, profiling), stop

    def _log_start(self, trainer: Trainer) -> None:
        for part in self.text.parts.values():
            if part.weights:
                logger.info(str(part))
        whole, position = trainer.parameter_counts()
        logger.info(
            f"{name_of_layers(self.config.position)}: {whole:,} parameters,"
            f" {position:,} of them in the encoding;"
            f" {self.facts['vocab']} rows of vocabulary; config {self.config.hash}"
        )
        logger.info(
            f"{self.grid.ranks} rank(s) on {self.grid.device.type}, {self.config.precision.dtype},"
            f" attention {trainer.model.attention_choice}"
        )

    def _steps(
        self, trainer: Trainer, metrics: Metrics | None, stop: Stop, profiling: Profiling
    ) -> Path | None:
        config = self.config
        progress = Progress(trainer.step, self.steps)
        watch = Watch(
            config,
            self.grid,
            self.text,
            metrics,
            pending=self.start.pending,
            skipped=self.start.skipped,
        )
        saved = None
        if self.start.path is None and is_saved(0, config.checkpoint):
            saved = self._save(trainer, watch, progress, stop)
        peak_memory(self.grid.device)  # so that the first line's peak leaves out the engine's start
        while trainer.step < self.steps:
            used = self.text.used
            with profiling.step(trainer.step + 1):
                result = trainer.train_step(self.text.next_step())
            step = trainer.step
            self.watchdog.advance(step)
            if profiling.writes:
                with progress.paused(), self.watchdog.slow():
                    profiling.after(step)
            watch.add(step, used, result)

            stops = step < self.steps and stop.wanted(step)
            last = stops or step == self.steps
            logs = last or _divides(config.logging.log_interval, step)
            validates = last or _divides(config.training.eval_interval, step)
            validates = validates and self.validates and not stops
            saves = last or is_saved(step, config.checkpoint)

            if logs or validates or saves:
                self.keeper.follow(watch.check())
            if logs:
                self._log(trainer, watch.take_mean(), result, progress, metrics)
            if validates:
                # Before the checkpoint: after a validation that is not finite none is written.
                with progress.paused(), self.watchdog.slow():
                    self._validate(trainer, metrics, stop)
                stops = stop.reason is not None
            if saves or stops:
                saved = self._save(trainer, watch, progress, stop)
            if stops:
                break
        return saved

    def _noise_scale(self) -> NoiseScale | None:
        settings = self.config.logging
        if not settings.log_gradient_noise_scale:
            return None
        if self.config.precision.dtype == "fp16":
            logger.warning(
                "log_gradient_noise_scale: is not measured with fp16, whose gradients are scaled -"
                " use bf16 or fp32"
            )
            return None
        return NoiseScale(
            self.text.windows_per_step,
            settings.gradient_noise_scale_n_batches,
            self.grid,
            on_cpu=settings.gradient_noise_scale_cpu_offload,
            state=self.start.record.get("noise_scale"),
        )

    def _keeper(self) -> Keeper:
        """What deletes checkpoints: of the first rank alone."""
        settings = self.config.checkpoint
        return Keeper(
            self.folder if self.grid.first else None,
            settings.keep_last_n_checkpoints,
            started_at=self.start.step if self.start.path else None,
            record=self.start.record,
            stay=settings.extra_save_iters,
        )

    @property
    def _folder_of_logs(self) -> Path | None:
        log_dir = self.config.logging.log_dir
        return Path(log_dir) if log_dir else self.folder

    def _metrics(self, step: int) -> Metrics | None:
        """The logs, on the first rank alone; UserError on every rank where they cannot be had."""
        folder = self._folder_of_logs
        resumed_at = step if self.start.path else None
        with shared_faults(self.grid):
            if self.grid.first:
                settings = self.config.flat()
                return Metrics(
                    folder,
                    self.config.logging,
                    settings,
                    resumed_at=resumed_at,
                    run_id=self.facts.get("wandb"),
                )
        return None

    def _log(
        self,
        trainer: Trainer,
        loss: float,
        result: dict[str, Any],
        progress: Progress,
        metrics: Metrics | None,
    ) -> None:
        """One record of the mean loss since the last one, and of speed and memory."""
        if metrics is None:
            return
        step = trainer.step
        seconds = progress.advance(step)
        length = self.config.model.seq_length
        tokens_per_second = self.text.windows_per_step * length / seconds
        speed = self.throughput.numbers(tokens_per_second / self.grid.ranks)
        norm = None
        if self.config.logging.log_grad_norm and result["grad_norm"] is not None:
            norm = float(result["grad_norm"])
        memory = peak_memory(self.grid.device) / 2**30
        learned = trainer.model.learned()
        numbers = {
            "loss": loss,
            "lr": result["lr"],
            "grad_norm": norm,
            "tokens_per_second": tokens_per_second,
            "seconds_per_step": seconds,
            **speed,
            "peak_memory_gib": memory,
            "tokens": self.text.used * length,
        }
        noise = {} if trainer.noise is None else trainer.noise.numbers()
        numbers |= noise
        metrics.log(step, "train", numbers, learned)

        words = [f"step {step}/{self.steps}", f"loss {loss:.4f}", f"lr {result['lr']:.2e}"]
        if norm is not None:
            words.append(f"grad norm {norm:.3f}")
        if noise.get("noise_scale") is not None:
            words.append(f"noise scale {noise['noise_scale']:.3g} windows")
        words += [f"{tokens_per_second:,.0f} tokens/s", speed_text(speed)]
        if trainer.model.pairs.skipped > 0:
            words.append(f"attention: {trainer.model.pairs}")
        words += [f"peak {memory:.2f} GiB", f"{progress.remaining()} left"]
        for name, value in list(learned.items())[:SHOWN]:
            words.append(f"{name} {value.mean():.3f}")
        logger.info("  ".join(words))

    def _validate(self, trainer: Trainer, metrics: Metrics | None, stop: Stop) -> None:
        """Measure and log the validation loss, unless a reason to stop comes up meanwhile."""
        length = self.config.data.seq_length_val
        count = self.config.training.eval_iters
        loss = trainer.validate(self.text.validation(), count, stops=stop.wanted)
        if loss is None:
            return
        if not math.isfinite(loss):
            raise UserError(
                f"validation: its loss is {loss} at step {trainer.step}, no checkpoint of this step"
                " is written - continue from an earlier one with a lower optimizer.params.lr"
            )
        if metrics is None:
            return
        perplexity = math.exp(min(loss, 700.0))
        numbers = {"loss": loss, "perplexity": perplexity, "length": length}
        metrics.log(trainer.step, "valid", numbers)
        logger.info(
            f"step {trainer.step}: validation loss {loss:.4f},"
            f" perplexity {perplexity:.3f} at length {length}"
        )

    def _save(self, trainer: Trainer, watch: Watch, progress: Progress, stop: Stop) -> Path | None:
        """Write a checkpoint and return its folder; None where the run has no folder."""
        if self.folder is None:
            return None
        facts = self.facts | {
            "windows": self.text.used,
            "windows_per_step": self.text.windows_per_step,
            "ranks": self.grid.ranks,
            "threads": torch.get_num_threads(),
            "pending_losses": watch.pending(),
            "skipped": watch.skipped,
        }
        if trainer.noise is not None:
            facts["noise_scale"] = trainer.noise.state()
        with progress.paused(), stop.saving(), self.watchdog.slow():
            saved = checkpoint.save(trainer, self.folder, facts | self.keeper.facts())
            self.keeper.wrote(trainer.step)
            logger.info("saved %s", saved)
        return saved


def _check_validation_length(model: GPT, config: Config) -> None:
    """Refuse a length that the encoding cannot compute now, not at the first validation."""
    one_window = torch.zeros(1, config.data.seq_length_val, config.model.hidden_size)
    model.position.on_embeddings(one_window)


def _divides(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0
