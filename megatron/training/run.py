"""The training loop: data -> trainer -> metrics, validations and checkpoints."""

import logging
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.loader import batches
from megatron.data.samples import build_split
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.parallel.grid import Grid
from megatron.parallel.owned import owned_by_first
from megatron.parallel.threads import count_parameters, use_threads
from megatron.training import checkpoint
from megatron.training.folders import folders_of
from megatron.training.metrics import Metrics, Progress
from megatron.training.start import Start, starting_point
from megatron.training.stop import Stop
from megatron.training.throughput import (
    Throughput,
    flops_per_token,
    peak_memory,
    peak_tflops,
    speed_text,
)
from megatron.training.trainer import Trainer
from megatron.training.vocabulary import check_vocabulary

logger = logging.getLogger(__name__)

SHOWN = 4  # learned numbers of the encoding in a line of the console


def train(config: Config, grid: Grid) -> Path | None:
    """Train as the configuration says, from its checkpoint if there is one.

    Returns the last checkpoint's folder. Everything that can be refused is refused before the
    engine is built. The first rank owns the folders that are written.
    """
    with owned_by_first(grid, *folders_of(config)):
        return _train(config, grid)


def _train(config: Config, grid: Grid) -> Path | None:
    config.check_batch(grid.ranks)
    with config.naming_places("data_path"):
        tokens = TokenFile.open(config.data.data_path or "")
    facts = check_vocabulary(config, tokens)
    start = starting_point(config, facts, grid)
    model = from_config(config, facts["vocab"])
    if config.training.eval_interval:
        _check_validation_length(model, config)
    run = Run(config, grid, tokens, facts, start)
    use_threads(count_parameters(model), grid.device, before=start.threads)
    return run.to_the_end(Trainer(config, model, grid))


class Run:
    """What surrounds a trainer: its data, metrics and checkpoints.

    UserError where the data do not suffice.
    """

    def __init__(
        self, config: Config, grid: Grid, tokens: TokenFile, facts: dict[str, Any], start: Start
    ) -> None:
        self.config = config
        self.grid = grid
        self.tokens = tokens
        self.facts = facts
        self.start = start

        training = config.training
        self.steps = training.train_iters
        micro_batches = training.gradient_accumulation_steps * grid.ranks
        self.windows_per_step = training.train_micro_batch_size_per_gpu * micro_batches
        self.tokens_per_step = self.windows_per_step * config.model.seq_length

        peak = config.logging.peak_theoretical_tflops
        peak = peak or peak_tflops(grid.device, config.precision.dtype)
        linear, attention = flops_per_token(config.model, facts["vocab"])
        self.throughput = Throughput(linear, attention, peak)

        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self.windows = start.windows
        self.train_windows = self._windows("train", config.model.seq_length, start.windows)
        self.validates = bool(training.eval_interval and training.eval_iters)
        if self.validates:
            self._windows("valid", config.data.seq_length_val)

    def to_the_end(self, trainer: Trainer) -> Path | None:
        """Train up to train_iters with log lines, checkpoints and validations.

        Returns the last checkpoint's folder. A signal ends the process after its step.
        """
        self._log_start(trainer)
        if self.start.step >= self.steps:
            logger.info("step %d of %d: nothing left to train", self.start.step, self.steps)
            return self.start.path
        if self.start.path is not None:
            checkpoint.resume(trainer, self.start.path)
        metrics = self._metrics(trainer.step) if self.grid.first else None
        with Stop(self.grid) as stop:
            saved = self._steps(trainer, metrics, stop)
        if metrics is not None:
            metrics.close()
        if trainer.step < self.steps:
            logger.warning(
                f"stopped at step {trainer.step} of {self.steps}, saved {saved};"
                f" load={saved} continues it"
            )
            sys.exit(128 + (stop.signal or signal.SIGTERM))
        return saved

    def _log_start(self, trainer: Trainer) -> None:
        whole, position = trainer.parameter_counts()
        logger.info(
            f"{self.config.position.pos_emb}: {whole:,} parameters,"
            f" {position:,} of them in the encoding;"
            f" {self.facts['vocab']} rows of vocabulary; config {self.config.hash}"
        )
        logger.info(
            f"{self.grid.ranks} rank(s) on {self.grid.device.type}, {self.config.precision.dtype},"
            f" attention {trainer.model.attention_choice}"
        )

    def _steps(self, trainer: Trainer, metrics: Metrics | None, stop: Stop) -> Path | None:
        config = self.config
        saved = None
        progress = Progress(trainer.step, self.steps)
        peak_memory(self.grid.device)  # so that the first line's peak leaves out the engine's start
        losses = [torch.tensor(loss, device=self.grid.device) for loss in self.start.pending]
        while trainer.step < self.steps:
            result = trainer.train_step(self._micro_batches())
            self.windows += self.windows_per_step
            losses.append(result.pop("loss"))

            step = trainer.step
            stops = stop.wanted(step)
            last = stops or step == self.steps
            saves = last or _divides(config.checkpoint.save_interval, step)
            saves = saves and self.folder is not None
            logs = last or _divides(config.logging.log_interval, step)
            validates = last or _divides(config.training.eval_interval, step)

            if logs or saves:
                # Only now do the ranks wait for each other, and the host for the device.
                losses = list(self.grid.mean(torch.stack(losses)))
                _check_finite(losses, step)
            if logs:
                loss = torch.stack(losses).mean().item()
                self._log(trainer, loss, result, progress, metrics)
                losses.clear()
            if saves:
                with progress.paused():
                    saved = self._save(trainer, losses)
            if stops:
                break
            if self.validates and validates:
                with progress.paused():
                    self._validate(trainer, metrics)
        return saved

    def _micro_batches(self) -> list[Tensor]:
        """The next step's batches of this rank: [micro_batch, length + 1] each."""
        count = self.config.training.gradient_accumulation_steps
        return [next(self.train_windows) for _ in range(count)]

    def _metrics(self, step: int) -> Metrics:
        log_dir = self.config.logging.log_dir
        folder = Path(log_dir) if log_dir else self.folder
        resumed_at = step if self.start.path else None
        return Metrics(folder, self.config.logging, self.config.flat(), resumed_at=resumed_at)

    def _windows(self, part: str, length: int, used: int = 0) -> Iterator[Tensor]:
        """Batches [micro_batch, length + 1] of a part, after `used` windows of all ranks."""
        training = self.config.training
        micro_batch = training.train_micro_batch_size_per_gpu
        if part == "train":
            num_samples = self.steps * self.windows_per_step
        else:
            num_samples = training.eval_iters * micro_batch * self.grid.ranks
        samples = build_split(
            self.tokens,
            split=self.config.data.split,
            part=part,
            length=length,
            seed=training.seed,
            num_samples=num_samples,
        )
        return batches(
            samples,
            micro_batch,
            rank=self.grid.rank,
            ranks=self.grid.ranks,
            start=used,
            repeat=True,
            num_workers=self.config.data.num_workers,
            pin_memory=self.grid.device.type == "cuda",
        )

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
        tokens_per_second = self.tokens_per_step / seconds
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
            "tokens": self.windows * self.config.model.seq_length,
        }
        metrics.log(step, "train", numbers, learned)

        words = [f"step {step}/{self.steps}", f"loss {loss:.4f}", f"lr {result['lr']:.2e}"]
        if norm is not None:
            words.append(f"grad norm {norm:.3f}")
        words += [f"{tokens_per_second:,.0f} tokens/s", speed_text(speed)]
        words += [f"peak {memory:.2f} GiB", f"{progress.remaining()} left"]
        for name, value in list(learned.items())[:SHOWN]:
            words.append(f"{name} {value.mean():.3f}")
        logger.info("  ".join(words))

    def _validate(self, trainer: Trainer, metrics: Metrics | None) -> None:
        length = self.config.data.seq_length_val
        count = self.config.training.eval_iters
        loss = trainer.validate(self._windows("valid", length), count)
        if metrics is None:
            return
        perplexity = math.exp(min(loss, 700.0))
        numbers = {"loss": loss, "perplexity": perplexity, "length": length}
        metrics.log(trainer.step, "valid", numbers)
        logger.info(
            f"step {trainer.step}: validation loss {loss:.4f},"
            f" perplexity {perplexity:.3f} at length {length}"
        )

    def _save(self, trainer: Trainer, losses: list[Tensor]) -> Path:
        """Write a checkpoint; `losses` are those not yet logged."""
        assert self.folder is not None
        facts = self.facts | {
            "windows": self.windows,
            "windows_per_step": self.windows_per_step,
            "ranks": self.grid.ranks,
            "threads": torch.get_num_threads(),
            "pending_losses": [loss.item() for loss in losses],
        }
        saved = checkpoint.save(trainer, self.folder, facts)
        if self.grid.first:
            count = self.config.checkpoint.keep_last_n_checkpoints
            checkpoint.keep_last(self.folder, trainer.step, count)
            logger.info("saved %s", saved)
        return saved


def _check_validation_length(model: GPT, config: Config) -> None:
    """Refuse a length that the encoding cannot compute now, not at the first validation."""
    one_window = torch.zeros(1, config.data.seq_length_val, config.model.hidden_size)
    model.position.on_embeddings(one_window)


def _divides(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0


def _check_finite(losses: list[Tensor], step: int) -> None:
    """Stop before NaN weights replace a good checkpoint."""
    if not losses:
        return
    stacked = torch.stack(losses)
    if not stacked.isfinite().all():
        cure = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
        raise UserError(f"loss: {stacked.mean().item()} by step {step} - {cure}")
