"""A run's numbers for each step: speed, loss and more, and where they are logged.

They go to metrics.jsonl, tensorboard and Weights & Biases. If a log fails, a warning says so and
the run continues, because no log is worth hours of training.
"""

import itertools
import json
import logging
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.config import Config
from megatron.config.schema import Logging, Model
from megatron.errors import cannot_write, in_words
from megatron.files import write_text
from megatron.model import Architecture
from megatron.model.size import BACKWARD, attention_flops, palm_weights
from megatron.parallel.grid import Grid
from megatron.training.batches import length_of_step, windows_per_step
from megatron.training.trainer import StepResult, Trainer

logger = logging.getLogger(__name__)

WIDTH = 100  # characters in a line of the log
CONSOLE = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "seq_length": "length {}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "left": "{} left",
    "grad_norm": "grad norm {:.3f}",
    "peak_memory_gib": "peak {:.2f} GiB",
}
"""The numbers in a line of the log, most important first; metrics.jsonl has all of them."""
LARGEST_TABLE = 1024
"""How many numbers of a parameter a record may hold: enough for kernels, not for a table of learned
positions."""
PEAKS: dict[str, list[float | None]] = yaml.safe_load(
    Path(__file__).with_name("peak_tflops.yml").read_text(encoding="utf-8")
)


# --- speed ----------------------------------------------------------------------------------------


def flops_per_token(model: Model, vocab: int) -> float:
    """6 N + 12 layers hidden length: FLOPs of one token, forward and backward.

    `hidden` is the number of features of all heads.

    By PaLM (arXiv 2204.02311, appendix B). `model` is the configuration's section. N counts the
    weights that multiply: blocks, final norm and output matrix, not the looked-up input embedding
    and not the encoding. Attention counts all pairs of tokens, as PaLM does, although a causal
    token attends to half of them. Recomputation doesn't count.
    """
    architecture = Architecture.of(model)
    products = 2.0 * palm_weights(architecture, vocab)
    return BACKWARD * (products + attention_flops(architecture, keys=float(model.seq_length)))


def utilisation(flops: float, tokens_per_second: float, peak: float | None) -> dict[str, float]:
    """Model TFLOP/s of one device, and its share of the peak TFLOP/s if the peak is known.

    flops: of one token; mfu: PaLM's model FLOP utilisation.
    """
    tflops = flops * tokens_per_second / 1e12
    numbers = {"model_tflops_per_second": tflops}
    if peak is not None:
        numbers["mfu"] = tflops / peak
    return numbers


def peak_of(name: str, products: str) -> float | None:
    """Dense TFLOP/s of a device from its data sheet, or None if unknown.

    name: as CUDA gives it: `NVIDIA A100-SXM4-80GB`, `Tesla V100-SXM2-16GB` …
    products: the number format of matrix products, fp16, bf16, fp32 or tf32
    """
    bare = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    for pattern, peaks in PEAKS.items():
        if re.fullmatch(pattern, bare):
            return peaks[("fp16", "bf16", "fp32", "tf32").index(products)]
    return None


def peak_memory(device: torch.device) -> int:
    """Peak bytes: on CUDA since the last call, on the CPU over the life of this process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- where the numbers go -------------------------------------------------------------------------

Numbers = dict[str, Any]
"""Called with one record: step, kind (train or valid), and numbers by name."""


class Metrics:
    """Writes each step's numbers to every log that the configuration names.

    folder: for metrics.jsonl (None: don't write it); settings: the section `logging`
    config: all keys, for Weights & Biases; resumed_at: the step to continue after, None for a new
        run
    run_id: id of the Weights & Biases run, or None if there is none
    Raises UserError if a log cannot be written at the start; later it is only a warning.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Logging,
        config: dict[str, Any],
        *,
        resumed_at: int | None = None,
        run_id: str | None = None,
    ) -> None:
        self.writers: dict[str, Callable[[Numbers, Numbers], None]] = {}
        self.lost: set[str] = set()  # logs that have failed once
        self.ends: list[Callable[[], None]] = []
        place = ""
        try:
            if folder is not None:
                self.path = folder / "metrics.jsonl"
                place = str(self.path)
                folder.mkdir(parents=True, exist_ok=True)
                _make_room(self.path, resumed_at)
                self.writers[place] = self._write_line
            if settings.tensorboard_dir:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                place = f"tensorboard_dir: {settings.tensorboard_dir}"
                purge_step = resumed_at + 1 if resumed_at else None
                events = SummaryWriter(settings.tensorboard_dir, purge_step=purge_step)

                def write_events(record: Numbers, charts: Numbers) -> None:
                    for name, value in charts.items():
                        events.add_scalar(name, value, record["step"])

                self.writers[place] = write_events
                self.ends.append(events.close)
        except OSError as fault:
            raise cannot_write(place, fault) from None
        self.places = list(self.writers)
        if settings.use_wandb and run_id is not None:
            try:
                import wandb  # slow to import

                # It never asks for an API key on the terminal.
                options: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": 15}
                if settings.wandb_host:
                    options["base_url"] = settings.wandb_host
                run = wandb.init(
                    project=settings.wandb_project,
                    entity=settings.wandb_team,
                    group=settings.wandb_group,
                    config=config,
                    dir=folder,
                    id=run_id,
                    resume="allow",
                    settings=wandb.Settings(
                        **options, finish_timeout=30, finish_timeout_raises=True
                    ),
                )
                # Records have their own axis, because a resumed run sends the records after its
                # checkpoint again, and W&B's own counter would drop them.
                run.define_metric("step", hidden=True)
                run.define_metric("*", step_metric="step")
            except Exception as fault:  # no package, network, key or rights, a bad answer
                logger.warning(
                    f"use_wandb: cannot start ({in_words(fault)}) - the run continues without it;"
                    " check that the package is installed and its server answers, or set"
                    " WANDB_MODE=offline to keep the records for `wandb sync`"
                )
            else:
                self.writers["use_wandb"] = lambda record, charts: run.log(
                    {"step": record["step"], **charts}
                )
                # Without teardown a lost server causes a traceback at the very end.
                self.ends += [run.finish, wandb.teardown]
                self.places.append(f"Weights & Biases ({run.url or run.dir})")

    def log(
        self, step: int, kind: str, numbers: Numbers, learned: dict[str, Tensor] | None = None
    ) -> None:
        """Write one record. kind: train or valid; learned: the encoding's parameters, per head."""
        record: Numbers = {"step": step, "kind": kind}
        charts: Numbers = {}
        for name, value in numbers.items():  # JSON has no infinity
            is_finite = not isinstance(value, float) or math.isfinite(value)
            record[name] = value if is_finite else None
            if record[name] is not None:
                charts[f"{kind}/{name}"] = value
        tables = {}
        for name, tensor in (learned or {}).items():
            for statistic in ("mean", "min", "max"):
                charts[f"position/{name}/{statistic}"] = getattr(tensor, statistic)().item()
            if tensor.numel() <= LARGEST_TABLE:
                tables[name] = [float(f"{value:.6g}") for value in tensor.flatten().tolist()]
        if tables:
            record["position"] = tables
        for place, write in self.writers.items():
            try:
                write(record, charts)
            except Exception as fault:  # anything that a library or a disk may raise
                if place not in self.lost:
                    self.lost.add(place)
                    logger.warning(
                        f"{place}: step {step} could not be written ({in_words(fault)})"
                        " - training continues, and later records will be written if possible"
                    )

    def close(self) -> None:
        """Write what is still in buffers."""
        for end in self.ends:
            try:
                end()
            except Exception as fault:  # anything that a library or a disk may raise
                logger.warning(f"logging: the last records are lost ({in_words(fault)})")

    def _write_line(self, record: Numbers, charts: Numbers) -> None:
        """Append a whole line, or nothing if the disk is full."""
        line = (json.dumps(record) + "\n").encode()
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) < len(line):
                file.truncate(end)
                raise OSError("the disk is full")


class TrainingLog(Metrics):
    """The lines of a training log: a record of numbers, and a line for the console.

    It measures the speed of the steps between two lines and estimates the remaining time.

    record: checkpoint.json of the start; facts: of the next one. Only the first rank writes.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        folder: Path | None,
        vocab: int,
        record: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        from tqdm import tqdm  # of the extra `train`, as the engine

        settings = config.logging
        super().__init__(
            folder if grid.first else None,
            settings if grid.first else Logging(),
            config.flat(),
            resumed_at=record.get("step"),
            run_id=facts.get("wandb"),
        )
        if self.places:
            logger.info(f"records: {', '.join(self.places)}")
        self.config, self.grid, self.vocab = config, grid, vocab
        self.steps = config.training.train_iters
        self.first_step = self.last_step = record.get("step", 0)
        self.started = self.moment = _now()
        self.bar = tqdm(  # a bar on a terminal, lines in a log
            total=self.steps,
            initial=self.first_step,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            disable=not (grid.first and sys.stderr.isatty()),
        )
        self.ends.append(self.bar.close)
        self.peak = settings.peak_theoretical_tflops
        if self.peak is None and grid.device.type == "cuda":
            name = torch.cuda.get_device_name(grid.device)
            precision = config.precision
            self.peak = peak_of(name, precision.products(precision.dtype))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block (a validation or a checkpoint) from the step times."""
        before = _now()
        yield
        self.moment += _now() - before

    def step(self, trainer: Trainer, result: StepResult, loss: float, more: Numbers) -> None:
        """Log the steps since the last line.

        result: of the last step; loss: the mean; more: further numbers
        """
        config, step = self.config, trainer.step
        moment = _now()
        seconds = (moment - self.moment) / max(1, step - self.last_step)
        self.last_step, self.moment = step, moment
        length = length_of_step(config, step)
        windows = windows_per_step(config) * self.grid.data_ranks
        speed = windows * config.model.seq_length / seconds
        numbers: Numbers = {"loss": loss, "lr": result.lr}
        if config.logging.log_grad_norm and result.grad_norm is not None:
            numbers["grad_norm"] = float(result.grad_norm)
        numbers |= {"tokens_per_second": speed, "seconds_per_step": seconds}
        if config.training.seq_length_schedule:
            numbers["seq_length"] = length
        model = config.model.model_copy(update={"seq_length": length})
        flops = flops_per_token(model, self.vocab)
        numbers |= utilisation(flops, speed / self.grid.ranks, self.peak)
        numbers["peak_memory_gib"] = peak_memory(self.grid.device) / 2**30
        numbers |= more
        learned = trainer.model.learned()
        self.log(step, "train", numbers, learned)

        if not self.bar.disable:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s")
            return
        # The remaining time if the other steps take as long as those so far, including pauses.
        done = max(1, step - self.first_step)
        left = (_now() - self.started) / done * (self.steps - step)
        numbers["left"] = timedelta(seconds=round(left))
        words = [text.format(numbers[name]) for name, text in CONSOLE.items() if name in numbers]
        words += [f"{name} {value.mean():.3f}" for name, value in learned.items()]
        line = f"step {step}/{self.steps}"
        for word in words:
            longer = f"{line}  {word}"
            if len(longer) > WIDTH:
                break
            line = longer
        logger.info(line)

    def validation(self, step: int, loss: float) -> None:
        perplexity = math.exp(min(loss, 700.0))
        length = self.config.data.seq_length_val
        numbers = {"loss": loss, "perplexity": perplexity, "length": length}
        self.log(step, "valid", numbers)
        logger.info(
            f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:.3f} at length"
            f" {length}"
        )


def _now() -> float:
    """The time in seconds, after the device has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _make_room(path: Path, resumed_at: int | None) -> None:
    """Drop the records that a resumed run will write again; rename a file of another run."""
    if not path.exists():
        return
    if resumed_at is not None:
        with suppress(ValueError, KeyError):  # a damaged file is renamed
            *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
            earlier_lines = [
                f"{line}\n" for line in lines if json.loads(line)["step"] <= resumed_at
            ]
            write_text(path, "".join(earlier_lines))
            return
    copies = (path.with_name(f"metrics.{count}.jsonl") for count in itertools.count(1))
    path.rename(next(copy for copy in copies if not copy.exists()))
