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
from megatron.model import from_config
from megatron.parallel.grid import Grid
from megatron.training import checkpoint
from megatron.training.metrics import Metrics, Progress
from megatron.training.start import Start, starting_point
from megatron.training.stop import Stop
from megatron.training.throughput import Throughput, flops_per_token, peak_memory, peak_tflops, said
from megatron.training.trainer import Trainer
from megatron.training.vocabulary import check_vocabulary

logger = logging.getLogger(__name__)


def train(config: Config, grid: Grid) -> Path | None:
    """Train as the configuration says, from its checkpoint if there is one; returns the last checkpoint's folder."""
    config.check_batch(grid.ranks)
    with config.naming_places("data_path"):
        tokens = TokenFile.open(config.data.data_path or "")
    facts = check_vocabulary(config, tokens)
    start = starting_point(config, facts, grid)
    model = from_config(config, facts["vocab"])
    if (
        config.training.eval_interval
    ):  # a length that the encoding refuses is said now, not at the first validation
        model.position.on_embeddings(
            torch.zeros(1, config.data.seq_length_val, config.model.hidden_size)
        )
    run = Run(config, grid, tokens, facts, start)
    return run.to_the_end(Trainer(config, model, grid))


class Run:
    """What surrounds a trainer: its data, its metrics and its checkpoints. Data that cannot be had are refused here."""

    def __init__(
        self, config: Config, grid: Grid, tokens: TokenFile, facts: dict[str, Any], start: Start
    ) -> None:
        self.config, self.grid, self.tokens, self.facts, self.start = (
            config,
            grid,
            tokens,
            facts,
            start,
        )
        training = config.training
        self.steps = training.train_iters
        self.windows_per_step = (
            training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
        )
        self.windows_per_step *= grid.ranks
        self.tokens_per_step = self.windows_per_step * config.model.seq_length
        peak = config.logging.peak_theoretical_tflops or peak_tflops(
            grid.device, config.precision.dtype
        )
        self.throughput = Throughput(*flops_per_token(config.model, facts["vocab"]), peak=peak)
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self.windows = start.windows
        self.train_windows = self._windows("train", config.model.seq_length, start.windows)
        self.validates = bool(training.eval_interval and training.eval_iters)
        if self.validates:
            self._windows("valid", config.data.seq_length_val)
        if self.folder is not None and grid.first:
            _make(self.folder)

    def to_the_end(self, trainer: Trainer) -> Path | None:
        """Steps, log lines, checkpoints and validations up to train_iters; the last checkpoint's folder."""
        if self.start.path is not None:
            checkpoint.resume(trainer, self.start.path)
        whole, position = trainer.parameter_counts()
        logger.info(
            f"{self.config.position.pos_emb}: {whole:,} parameters, {position:,} of them in the encoding;"
            f" {self.facts['vocab']} rows of vocabulary; config {self.config.hash}"
        )
        logger.info(
            f"{self.grid.ranks} rank(s) on {self.grid.device.type}, {self.config.precision.dtype},"
            f" attention {trainer.model.attention_choice}"
        )
        if trainer.step >= self.steps:
            logger.info("step %d of %d: nothing left to train", trainer.step, self.steps)
            return self.start.path
        metrics = self._metrics(trainer.step) if self.grid.first else None
        with Stop(self.grid) as stop:
            saved = self._steps(trainer, metrics, stop)
        if metrics is not None:
            metrics.close()
        if trainer.step < self.steps:
            logger.warning(
                f"stopped at step {trainer.step} of {self.steps}, saved {saved}; load={saved} continues it"
            )
            sys.exit(128 + (stop.signal or signal.SIGTERM))
        return saved

    def _steps(self, trainer: Trainer, metrics: Metrics | None, stop: Stop) -> Path | None:
        training, saved = self.config.training, None
        progress = Progress(trainer.step, self.steps)
        peak_memory(self.grid.device)  # building the engine is no part of the first line's peak
        losses = [torch.tensor(loss, device=self.grid.device) for loss in self.start.pending]
        while trainer.step < self.steps:
            steps = range(training.gradient_accumulation_steps)
            result = trainer.train_step([next(self.train_windows) for _ in steps])
            self.windows += self.windows_per_step
            losses.append(result.pop("loss"))
            step, stops = trainer.step, stop.wanted(trainer.step)
            last = stops or step == self.steps
            saves = self.folder is not None and (
                last or _divides(self.config.checkpoint.save_interval, step)
            )
            logs = last or _divides(self.config.logging.log_interval, step)
            if (
                logs or saves
            ):  # only now do the ranks, and the device and the host, wait for each other
                losses = list(self.grid.mean(torch.stack(losses)))
                _check_finite(losses, step)
            if logs:
                self._log(trainer, torch.stack(losses).mean().item(), result, progress, metrics)
                losses.clear()
            if saves:
                with progress.aside():
                    saved = self._save(trainer, losses)
            if stops:
                break
            if self.validates and (last or _divides(training.eval_interval, step)):
                with progress.aside():
                    self._validate(trainer, metrics)
        return saved

    def _metrics(self, step: int) -> Metrics:
        logs = Path(self.config.logging.log_dir) if self.config.logging.log_dir else self.folder
        return Metrics(
            logs,
            self.config.logging,
            self.config.flat(),
            resumed_at=step if self.start.path else None,
        )

    def _windows(self, part: str, length: int, used: int = 0) -> Iterator[Tensor]:
        """Batches [micro_batch, length + 1] of a part, after `used` windows of all ranks together."""
        training = self.config.training
        batch = training.train_micro_batch_size_per_gpu * self.grid.ranks
        samples = build_split(
            self.tokens,
            split=self.config.data.split,
            part=part,
            length=length,
            seed=training.seed,
            num_samples=self.steps * self.windows_per_step
            if part == "train"
            else training.eval_iters * batch,
        )
        return batches(
            samples,
            training.train_micro_batch_size_per_gpu,
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
        if metrics is None:
            return
        learned = trainer.model.learned()
        step, seconds = trainer.step, progress.advance(trainer.step)
        norm = result["grad_norm"] if self.config.logging.log_grad_norm else None
        norm = None if norm is None else float(norm)
        tokens_per_second = self.tokens_per_step / seconds
        speed = self.throughput.numbers(tokens_per_second / self.grid.ranks)
        memory = peak_memory(self.grid.device) / 2**30
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
        logger.info(
            f"step {step}/{self.steps}  loss {loss:.4f}  lr {result['lr']:.2e}"
            + ("" if norm is None else f"  grad norm {norm:.3f}")
            + f"  {tokens_per_second:,.0f} tokens/s  {said(speed)}  peak {memory:.2f} GiB  {progress.remaining()} left"
            + "".join(f"  {name} {value.mean():.3f}" for name, value in list(learned.items())[:4])
        )

    def _validate(self, trainer: Trainer, metrics: Metrics | None) -> None:
        length, count = self.config.data.seq_length_val, self.config.training.eval_iters
        loss = trainer.validate(self._windows("valid", length), count)
        if metrics is not None:
            step, perplexity = trainer.step, math.exp(min(loss, 700.0))
            metrics.log(step, "valid", {"loss": loss, "perplexity": perplexity, "length": length})
            logger.info(
                f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:.3f} at length {length}"
            )

    def _save(self, trainer: Trainer, losses: list[Tensor]) -> Path:
        assert self.folder is not None
        facts = self.facts | {
            "windows": self.windows,
            "windows_per_step": self.windows_per_step,
            "ranks": self.grid.ranks,
            "pending_losses": [loss.item() for loss in losses],
        }
        saved = checkpoint.save(trainer, self.folder, facts)
        if self.grid.first:
            checkpoint.keep_last(
                self.folder, trainer.step, self.config.checkpoint.keep_last_n_checkpoints
            )
            logger.info("saved %s", saved)
        return saved


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(
            f"save: {folder} cannot be made ({fault.strerror}) - choose another folder"
        ) from None


def _divides(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0


def _check_finite(losses: list[Tensor], step: int) -> None:
    """Before anything is saved over: weights that a loss that is no number came from are worth nothing."""
    if losses and not torch.stack(losses).isfinite().all():
        cure = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
        raise UserError(f"loss: {torch.stack(losses).mean().item()} by step {step} - {cure}")
