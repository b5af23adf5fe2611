"""The training loop: open, build, resume; then batch, forward, backward, step, log, save."""

import contextlib
import logging
import math
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints.saved import remove_unfinished, with_parent
from megatron.config import Config
from megatron.config.schema import Logging, plain
from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from megatron.model import from_config
from megatron.parallel.grid import Grid, owned_by_first, shared_faults
from megatron.parallel.threads import count_parameters, local_processes, use_threads
from megatron.training import checkpoint
from megatron.training.batches import Batches, length_of_step, open_text, with_epochs
from megatron.training.fits import check_fits
from megatron.training.metrics import (
    Metrics,
    Progress,
    flops_per_token,
    peak_memory,
    peak_of,
    utilisation,
)
from megatron.training.noise_scale import NoiseScale
from megatron.training.optimizer import learning_rate
from megatron.training.profiling import Profiling
from megatron.training.start import (
    load_matching_weights,
    match_weights,
    starting_point,
    with_schedule,
)
from megatron.training.stop import Stop
from megatron.training.trainer import Trainer
from megatron.training.universal import Engine

logger = logging.getLogger(__name__)

SHOWN = 4  # learned numbers of the encoding in a line of the console
SHOWN_NUMBERS = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "seq_length": "length {}",
    "grad_norm": "grad norm {:.3f}",
    "noise_scale": "noise scale {:.3g} windows",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "model_tflops_per_second": "{:.3g} model TFLOP/s",
    "peak_memory_gib": "peak {:.2f} GiB",
}
"""The numbers of a record in a line of the console, in this order."""
LOST_WORKER = "DataLoader worker"  # how torch's message about a lost process begins
REFUSED = "does not have a deterministic implementation"  # torch's words


def train(config: Config, grid: Grid) -> Path | None:
    """Train as the configuration says, from its checkpoint if there is one.

    Returns the last checkpoint's folder, also if exit_interval or exit_duration ends the run early.
    A signal ends the process with 128 + its number. Raises UserError if something does not fit,
    which is found before the engine is built, or a loss is not finite.
    """
    # Own `save`, and `log_dir` if that is another folder; what killed runs left is removed.
    save_to = config.checkpoint.save
    places = {"log_dir": config.logging.log_dir, "save": save_to}
    folders = {Path(place).resolve(): (key, place) for key, place in places.items() if place}
    owned = [owned_folder(Path(place), key) for key, place in folders.values()]
    with owned_by_first(grid, *owned), _known_faults():
        if save_to and grid.first:
            remove_unfinished(Path(save_to))

        # Open: the text, and the checkpoint that the run goes on from.
        with shared_faults(grid):
            config = with_parent(config)
            parallel = config.parallel
            grid = grid.sharing(parallel.context_parallel_size, parallel.model_parallel_size)
            config.check_batch(grid.data_ranks)
            parts, facts = open_text(config)
            config = with_epochs(config, parts["train"], grid.data_ranks)
        start = starting_point(config, facts, grid)
        config = with_schedule(config, start)
        if start.has_begun:  # no_load_optim was for the first start
            keys = config.checkpoint.model_copy(update={"no_load_optim": False})
            config = replace(config, checkpoint=keys)
        training, logs_as, vocab = config.training, config.logging, facts["vocab"]
        steps, length = training.train_iters, config.model.seq_length
        if config.checkpoint.parent.path is not None:
            facts["parent"] = plain(config.checkpoint.parent)
            facts["parent_model"] = start.parent_model
        if "wandb" in start.record or logs_as.use_wandb:
            facts["wandb"] = start.record.get("wandb") or secrets.token_hex(4)
        if start.step >= steps:
            logger.info("step %d of %d: nothing left to train", start.step, steps)
            return start.before.path if start.before else None

        optimizer = config.optimizer
        decayed = optimizer.lr_decay_iters
        if decayed < steps and optimizer.lr and not learning_rate(steps - 1, optimizer):
            logger.info(
                f"note: lr_decay_iters: after step {decayed} of {steps} the learning rate is 0, so"
                " nothing is learned; raise it or min_lr, or lower train_iters"
            )

        # Build: the model, its batches, and the engine.
        with shared_faults(grid):
            here = local_processes()
            need = check_fits(config, vocab, ranks=grid.ranks, ranks_here=here, device=grid.device)
        whole, of_encoding = need.parameters
        logger.info(f"{whole:,} parameters: {need}")
        model = from_config(config, vocab, facts["tokenizer"].get("eod"))
        batches = Batches(config, grid, parts, start.windows, start.planned)
        validates = bool(training.eval_interval and training.eval_iters)
        if validates:  # what cannot be validated is refused now
            one_window = torch.zeros(1, config.data.seq_length_val, config.model.hidden_size)
            model.position.on_embeddings(one_window)
            batches.validation()
        use_threads(count_parameters(model), grid.device, before=start.record.get("threads"))
        parent_weights = match_weights(start, model)
        trainer = Trainer(config, model, grid)
        logger.info(
            f"{config.label}: {whole:,} parameters,"
            f" {of_encoding:,} of them in the encoding;"
            f" {vocab} rows of vocabulary; config {config.hash}"
        )
        logger.info(
            f"{grid.ranks} rank(s) on {grid.device.type}, {config.precision.dtype},"
            f" attention {trainer.model.attention_choice}"
        )

        # Resume: all of a checkpoint, or a parent's weights.
        if parent_weights is not None:
            load_matching_weights(trainer, parent_weights)
        resumed_at = None
        if start.before is not None:
            resumed_at = start.step
            ranks = start.record.get("ranks", grid.ranks)
            written_by = Engine.of(start.before.config, ranks)
            updates = start.step - start.record.get("skipped", 0)
            checkpoint.resume(trainer, start.before.path, written_by, updates=updates)

        # What surrounds the loop.
        folder = Path(save_to) if save_to else None
        folder_of_logs = Path(logs_as.log_dir) if logs_as.log_dir else folder
        losses = Losses(config, grid, start.record)
        keeper = checkpoint.Keeper(
            folder if grid.first else None,
            config.checkpoint,
            started_at=resumed_at,
            record=start.record,
        )
        metrics = Metrics(None, Logging(), {})  # on other ranks nothing is written
        with shared_faults(grid):
            if grid.first:
                run_id = facts.get("wandb")
                keys = config.flat()
                metrics = Metrics(
                    folder_of_logs, logs_as, keys, resumed_at=resumed_at, run_id=run_id
                )
        stop = Stop(grid, steps=training.exit_interval, minutes=training.exit_duration)
        profiling = Profiling(logs_as, folder_of_logs, grid, done=start.step)
        progress = Progress(start.step, steps)
        peak = logs_as.peak_theoretical_tflops
        if peak is None and grid.device.type == "cuda":
            peak = peak_of(torch.cuda.get_device_name(grid.device), config.precision.dtype)
        if logs_as.log_gradient_noise_scale and config.precision.dtype == "fp16":
            logger.warning("log_gradient_noise_scale: is not measured with fp16 - use bf16 or fp32")
        elif logs_as.log_gradient_noise_scale:
            trainer.noise = NoiseScale(
                batches.per_step,
                logs_as.gradient_noise_scale_n_batches,
                grid,
                on_cpu=logs_as.gradient_noise_scale_cpu_offload,
                averages=start.record.get("noise_scale"),
            )

        def save() -> Path | None:
            if folder is None:
                return None
            record = facts | keeper.facts
            record |= {
                "windows": batches.used,
                "planned": batches.planned,
                "windows_per_step": batches.per_step,
                "ranks": grid.ranks,
                "data_ranks": grid.data_ranks,
                "threads": torch.get_num_threads(),
                "pending_losses": [loss.item() for loss in losses.means],
                "skipped": losses.skipped,
            }
            if trainer.noise is not None:
                record["noise_scale"] = trainer.noise.averages
            with progress.paused():
                path = checkpoint.save(trainer, folder, record)
                keeper.wrote(trainer.step)
                logger.info("saved %s", path)
            return path

        saved = None
        with contextlib.closing(metrics), stop, profiling:
            if start.before is None and checkpoint.is_saved(0, config.checkpoint):
                saved = save()
            peak_memory(grid.device)  # so that the first line's peak leaves out the engine's start

            for step in range(start.step + 1, steps + 1):
                length_now = length_of_step(config, step)
                with profiling.step(step):
                    result = train_step(trainer, batches.next_step(length_now))
                losses.add(step, result)

                stops = step < steps and stop.wanted(step)
                last = stops or step == steps
                logs = last or step % logs_as.log_interval == 0
                validates_now = validates and not stops
                if step < steps:
                    validates_now = validates_now and step % training.eval_interval == 0
                saves = last or checkpoint.is_saved(step, config.checkpoint)

                if logs or validates_now or saves:
                    keeper.follow(losses.check())
                if logs:
                    loss = torch.stack(losses.means).mean().item() if losses.means else math.nan
                    losses.means.clear()
                    numbers = {"loss": loss, "lr": result["lr"], "grad_norm": None}
                    if logs_as.log_grad_norm and result["grad_norm"] is not None:
                        numbers["grad_norm"] = float(result["grad_norm"])
                    seconds = progress.advance(step)
                    speed = batches.per_step * length / seconds
                    numbers |= {"tokens_per_second": speed, "seconds_per_step": seconds}
                    if training.seq_length_schedule:
                        numbers["seq_length"] = length_now
                    model_now = config.model.model_copy(update={"seq_length": length_now})
                    flops = flops_per_token(model_now, vocab)
                    numbers |= utilisation(flops, speed / grid.ranks, peak)
                    numbers["peak_memory_gib"] = peak_memory(grid.device) / 2**30
                    numbers["tokens"] = batches.used * length
                    if losses.skipped:
                        numbers["skipped"] = losses.skipped
                    if trainer.noise is not None:
                        numbers |= trainer.noise.numbers()
                    learned = trainer.model.learned()
                    metrics.log(step, "train", numbers, learned)
                    words = [f"step {step}/{steps}"]
                    for name, text in SHOWN_NUMBERS.items():
                        if numbers.get(name) is not None:
                            words.append(text.format(numbers[name]))
                    for name, value in list(learned.items())[:SHOWN]:
                        words.append(f"{name} {value.mean():.3f}")
                    logger.info("  ".join([*words, f"{progress.remaining()} left"]))
                if validates_now:
                    # Before the checkpoint: after a validation that is not finite none is written.
                    with progress.paused():
                        windows = batches.validation()
                        loss = trainer.validate(windows, training.eval_iters, stops=stop.wanted)
                    stops = stop.reason is not None
                    if loss is not None:
                        if not math.isfinite(loss):
                            raise UserError(
                                f"validation: its loss is {loss} at step {step}, no checkpoint of"
                                f" this step is written - {checkpoint.CURE}"
                            )
                        perplexity = math.exp(min(loss, 700.0))
                        at = config.data.seq_length_val
                        numbers = {"loss": loss, "perplexity": perplexity, "length": at}
                        metrics.log(step, "valid", numbers)
                        logger.info(
                            f"step {step}: validation loss {loss:.4f}, perplexity"
                            f" {perplexity:.3f} at length {at}"
                        )
                if saves or stops:
                    saved = save()
                if stops:
                    break

        if stop.reason is not None and trainer.step < steps:
            words, status = stop.reason
            outcome = f"saved {saved}; load={saved} continues it"
            if saved is None:
                outcome = "nothing was saved, for save is not set"
            logger.warning(f"stopped at step {trainer.step} of {steps} ({words}), {outcome}")
            if status:
                sys.exit(status)
        return saved


def train_step(trainer: Trainer, micro_batches: Sequence[Tensor]) -> dict[str, Any]:
    """One optimizer step over gradient_accumulation_steps batches [micro_batch, length + 1].

    Returns loss, lr, grad_norm, and skipped: whether nothing changed, because the loss or the
    gradient of some rank is not finite and skip_nonfinite allows it. All ranks skip together.
    """
    lr = trainer.begin_step()
    total = torch.zeros((), device=trainer.grid.device)
    for batch in micro_batches:
        loss = trainer.losses(batch, mean=True)
        total += loss.detach() / len(micro_batches)
        trainer.backward(loss)
        trainer.update()
    norm, skipped = trainer.end_step(total)
    return {"loss": total, "lr": lr, "grad_norm": norm, "skipped": skipped}


class Losses:
    """Losses since the last log line, and what happens if one is not finite.

    Every rank calls each method at the same step. record: checkpoint.json of the start, which holds
    mean losses that were not logged yet, and the number of skipped steps
    """

    def __init__(self, config: Config, grid: Grid, record: Mapping[str, Any]) -> None:
        self.config, self.grid = config, grid
        pending = record.get("pending_losses", ())
        self.means = [torch.tensor(loss, device=grid.device) for loss in pending]
        self.unchecked: list[tuple[int, Tensor]] = []  # steps, and [loss, norm] of this rank
        self.skipped: int = record.get("skipped", 0)

    def add(self, step: int, result: dict[str, Any]) -> None:
        """One step, with what `train_step` returned.

        Raises UserError if more steps were skipped than skip_nonfinite allows.
        """
        norm = result["grad_norm"]
        if norm is None or self.config.precision.dtype == "fp16":
            norm = 0.0  # in fp16 a loss scale that is too large is no fault of the step
        if not isinstance(norm, Tensor):
            # Filled on the device: a copy from the host would wait for it.
            norm = torch.full((), norm, device=self.grid.device)
        numbers = torch.stack([result["loss"].float(), norm.float()])
        if not result["skipped"]:
            self.unchecked.append((step, numbers))
            return
        self.skipped += 1
        allowed = self.config.training.skip_nonfinite
        what = f"{self._describe(step, numbers)}: skipped, {self.skipped} of {allowed}"
        if self.skipped > allowed:
            raise UserError(f"{what} (skip_nonfinite) - {checkpoint.CURE}")
        logger.warning(what)

    def check(self) -> list[tuple[int, float]]:
        """Steps since the last check with their mean losses over all ranks.

        Raises UserError if a loss or a norm of any rank is not finite. Only here the ranks wait for
        each other, and the host for the device.
        """
        if not self.unchecked:
            return []
        steps, numbers = zip(*self.unchecked, strict=True)
        means = self.grid.mean(torch.stack(numbers))  # [steps, 2]
        finite = means.isfinite().all(dim=1).tolist()
        if not all(finite):
            what = self._describe(*self.unchecked[finite.index(False)])
            raise UserError(f"{what} - {checkpoint.CURE}, or set skip_nonfinite")
        self.means += list(means[:, 0])
        self.unchecked.clear()
        return list(zip(steps, means[:, 0].tolist(), strict=True))

    def _describe(self, step: int, numbers: Tensor) -> str:
        """The number that is not finite at a step, and its rank."""
        everyones = self.grid.gather(numbers.tolist())  # [[loss, norm]] by rank
        for rank, (loss, _) in enumerate(everyones):
            if not math.isfinite(loss):
                return f"loss: {loss} at step {step} on rank {rank}"
        return f"gradient norm: {everyones[0][1]} at step {step}"


@contextlib.contextmanager
def _known_faults() -> Iterator[None]:
    """A lost process of num_workers, and an operation that torch cannot repeat, are one message."""
    try:
        yield
    except RuntimeError as fault:
        text = str(fault)
        if text.startswith(LOST_WORKER):
            reason = text.partition("\n")[0]
            raise UserError(
                f"data: a process that reads samples was lost ({reason})"
                " - start the same command again, with num_workers: 0 if it happens again"
            ) from None
        if REFUSED not in text:
            raise
        operation = text.partition(REFUSED)[0].strip()
        raise UserError(
            f"deterministic: {operation} {REFUSED} on this device"
            " - set deterministic: false, or take another encoding"
        ) from None
