"""The training loop: data -> DeepSpeed engine -> metrics and checkpoints."""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.attention import resolve
from megatron.config import Config
from megatron.config.deepspeed import deepspeed_config
from megatron.data.loader import batches
from megatron.data.samples import build_split
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.parallel.grid import Grid
from megatron.training import checkpoint
from megatron.training.metrics import Metrics, Progress
from megatron.training.optimizer import build_optimizer
from megatron.training.schedule import learning_rate
from megatron.training.vocabulary import check_vocabulary

logger = logging.getLogger(__name__)


class Trainer:
    """A model in the DeepSpeed engine, and the step it stands at."""

    def __init__(self, config: Config, model: GPT, grid: Grid) -> None:
        if config.precision.dtype == "fp16" and grid.device.type == "cpu":
            raise UserError("precision: fp16 needs a CUDA device - use bf16 or fp32 on the CPU")
        self.config, self.grid = config, grid
        self.step = 0
        model.to(grid.device)
        with quiet_deepspeed():
            import deepspeed

            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=build_optimizer(model, config.optimizer, grid.device),
                config=deepspeed_config(config),
                dist_init_required=False,
            )
        self.engine: Any = engine

    @property
    def model(self) -> GPT:
        return cast(GPT, self.engine.module)

    def train_step(self, micro_batches: list[Tensor]) -> dict[str, Tensor | float | None]:
        """One optimizer step over gradient_accumulation_steps batches [micro_batch, length + 1]: loss, lr, norm."""
        self.engine.train()
        # The randomness of a step depends on the seed, the step and the rank alone: a resumed run draws the same.
        torch.manual_seed((self.config.training.seed * 1_000_003 + self.step) * self.grid.ranks + self.grid.rank)
        lr = learning_rate(self.step, self.config.optimizer)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        total, norm = torch.zeros((), device=self.grid.device), None
        for batch in micro_batches:
            loss = self.losses(batch).mean()
            self.engine.backward(loss)
            if self.engine.is_gradient_accumulation_boundary() and not self.engine.zero_optimization():
                norm = _gradient_norm(self.model)
            self.engine.step()
            total += loss.detach() / len(micro_batches)
        self.step += 1
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return {"loss": total, "lr": lr, "grad_norm": norm}

    def losses(self, batch: Tensor) -> Tensor:
        """Cross entropy of each next token: batch [micro_batch, length + 1] int64 -> [micro_batch, length] float32."""
        ids = batch.to(self.grid.device, non_blocking=True)
        return self.engine(ids[:, :-1], labels=ids[:, 1:])

    @torch.no_grad()
    def validate(self, windows: Iterator[Tensor], count: int) -> float:
        """Mean loss over `count` batches of validation windows [micro_batch, length + 1], over all ranks."""
        self.engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for _ in range(count):
            batch = next(windows)
            # A longer window gets a smaller batch, so that validation never needs more memory than training.
            share = max(1, len(batch) * self.config.model.seq_length // (batch.shape[1] - 1))
            parts = [self.losses(part).double().sum() for part in batch.split(share)]
            total += torch.stack(parts).sum() / (len(batch) * (batch.shape[1] - 1))
        return self.grid.mean(total / count).item()


def train(config: Config, grid: Grid) -> Path | None:
    """Train as the configuration says, from its checkpoint if there is one; returns the last checkpoint's folder."""
    config.check_batch(grid.ranks)
    tokens = TokenFile.open(config.data.data_path or "")
    facts = check_vocabulary(config, tokens)
    start = starting_step(config)
    trainer = Trainer(config, from_config(config, facts["vocab"]), grid)
    if start:
        checkpoint.resume(trainer.engine, Path(config.checkpoint.load or ""), start)
        trainer.step = start
    if grid.first:
        _announce(config, trainer, facts)
    return Run(config, trainer, tokens, facts).to_the_end()


class Run:
    """A trainer with its data, its metrics and its checkpoints."""

    def __init__(self, config: Config, trainer: Trainer, tokens: TokenFile, facts: dict[str, Any]) -> None:
        self.config, self.trainer, self.tokens, self.facts = config, trainer, tokens, facts
        training, self.grid = config.training, trainer.grid
        self.steps = training.train_iters
        self.windows_per_step = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
        self.windows_per_step *= self.grid.ranks
        self.tokens_per_step = self.windows_per_step * config.model.seq_length
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self.saved: Path | None = None
        self.metrics: Metrics | None = None
        if self.grid.first:
            logs = Path(config.logging.log_dir) if config.logging.log_dir else self.folder
            self.metrics = Metrics(logs, config.logging, config.flat(), resumed_at=trainer.step)

    def to_the_end(self) -> Path | None:
        """Steps, log lines, validations and checkpoints up to train_iters."""
        training, logging_ = self.config.training, self.config.logging
        if self.trainer.step >= self.steps:
            logger.info("step %d of %d: nothing left to train", self.trainer.step, self.steps)
        train = self._windows("train", self.config.model.seq_length, self.trainer.step)
        progress, losses = Progress(self.trainer.step, self.steps), []
        while self.trainer.step < self.steps:
            result = self.trainer.train_step([next(train) for _ in range(training.gradient_accumulation_steps)])
            losses.append(result.pop("loss"))
            step = self.trainer.step
            if step % logging_.log_interval == 0 or step == self.steps:
                self._log(torch.stack(losses), result, progress)
                losses.clear()
            if training.eval_interval and (step % training.eval_interval == 0 or step == self.steps):
                self._validate()
            if self._due(step):
                self._save()
        if self.metrics is not None:
            self.metrics.close()
        return self.saved

    def _windows(self, part: str, length: int, steps_done: int = 0) -> Iterator[Tensor]:
        """Batches [micro_batch, length + 1] of a part, from where `steps_done` optimizer steps have left it."""
        training = self.config.training
        batch = training.train_micro_batch_size_per_gpu * self.grid.ranks
        wanted = self.steps * self.windows_per_step if part == "train" else training.eval_iters * batch
        samples = build_split(
            self.tokens,
            split=self.config.data.split,
            part=part,
            length=length,
            seed=training.seed,
            num_samples=wanted,
        )
        return batches(
            samples,
            training.train_micro_batch_size_per_gpu,
            rank=self.grid.rank,
            ranks=self.grid.ranks,
            start=steps_done * self.windows_per_step,
            repeat=True,
            num_workers=self.config.data.num_workers,
        )

    def _log(self, losses: Tensor, result: dict[str, Any], progress: Progress) -> None:
        step, loss = self.trainer.step, float(self.grid.mean(losses.mean()))
        if not math.isfinite(loss):
            cure = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
            raise UserError(f"loss: {loss} at step {step} - {cure}")
        if self.metrics is None:
            return
        seconds = progress.advance(step)
        norm = result["grad_norm"] if self.config.logging.log_grad_norm else None
        numbers = {
            "loss": loss,
            "lr": result["lr"],
            "grad_norm": None if norm is None else float(norm),
            "tokens_per_second": self.tokens_per_step / seconds,
            "seconds_per_step": seconds,
            "tokens": step * self.tokens_per_step,
        }
        self.metrics.log(step, "train", numbers, self.trainer.model.position.learned())
        logger.info(
            f"step {step}/{self.steps}  loss {loss:.4f}  lr {result['lr']:.2e}"
            + ("" if norm is None else f"  grad norm {float(norm):.3f}")
            + f"  {self.tokens_per_step / seconds:,.0f} tokens/s  {progress.remaining()} left"
        )

    def _validate(self) -> None:
        length, count = self.config.data.seq_length_val, self.config.training.eval_iters
        loss = self.trainer.validate(self._windows("valid", length), count)
        if self.metrics is not None:
            step, perplexity = self.trainer.step, math.exp(loss)
            self.metrics.log(step, "valid", {"loss": loss, "perplexity": perplexity, "length": length})
            logger.info(f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:.3f} at length {length}")

    def _due(self, step: int) -> bool:
        interval = self.config.checkpoint.save_interval
        return self.folder is not None and (step == self.steps or bool(interval and step % interval == 0))

    def _save(self) -> None:
        assert self.folder is not None
        self.saved = checkpoint.save(
            self.trainer.engine, self.folder, self.trainer.step, self.config, self.facts, self.grid
        )
        if self.grid.first:
            checkpoint.keep_last(self.folder, self.config.checkpoint.keep_last_n_checkpoints)
            logger.info("saved %s", self.saved)


def starting_step(config: Config) -> int:
    """The step to continue from, 0 for a new run; UserError where a checkpoint would be lost, missed or mixed up."""
    save, load = config.checkpoint.save, config.checkpoint.load
    held = checkpoint.latest_step(Path(save)) if save else None
    same = save is not None and load is not None and Path(load).resolve() == Path(save).resolve()
    if held is not None and not same:
        cure = f"set load: {save} to continue it, or save elsewhere"
        raise UserError(f"save: {save} holds a checkpoint of step {held} already - {cure}")
    if load is None:
        return 0
    step = checkpoint.latest_step(Path(load))
    if step is None and same:
        logger.info("no checkpoint in %s yet: starting at step 0", load)
        return 0
    path = checkpoint.find(load, step)
    _check_same_model(config, checkpoint.read_meta(path)[0], path)
    return int(step or 0)


def _check_same_model(config: Config, trained: Config, path: Path) -> None:
    """Refuse another model than the checkpoint's; name every other difference."""
    now, then = config.flat(), trained.flat()
    different = [key for key in now if now[key] != then.get(key)]
    fixed = {*type(config.model).model_fields, *type(config.position).model_fields}
    broken = [f"{key}: {then.get(key)!r} there, {now[key]!r} here" for key in different if key in fixed]
    if broken:
        raise UserError(
            f"load: {path} is another model ({'; '.join(broken)}) - use its configuration, or save elsewhere"
        )
    for key in different:
        logger.info("continuing with another %s: %r, was %r", key, now[key], then.get(key))


def _announce(config: Config, trainer: Trainer, facts: dict[str, Any]) -> None:
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    learned = sum(parameter.numel() for parameter in trainer.model.position.parameters())
    logger.info(
        "%s: %s parameters, %d of them in the encoding; %d rows of vocabulary; config %s",
        config.position.pos_emb,
        f"{parameters:,}",
        learned,
        facts["vocab"],
        config.hash,
    )
    logger.info(
        "%d rank(s) on %s, %s, attention %s",
        trainer.grid.ranks,
        trainer.grid.device.type,
        config.precision.dtype,
        resolve(config.attention.attention_backend),
    )


def _gradient_norm(model: torch.nn.Module) -> Tensor:
    """The norm of the whole gradient, before clipping."""
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Leave only DeepSpeed's warnings on the console; it also prints memory figures while it builds an engine."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed|torch\.distributed")
    with redirect_stdout(StringIO()):
        yield
