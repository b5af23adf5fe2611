"""Numbers of a run by step (JSON lines, tensorboard, Weights & Biases) and the time left."""

import itertools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import Logging
from megatron.errors import UserError
from megatron.files import write_text

logger = logging.getLogger(__name__)

LARGEST_TABLE = 1024
"""Numbers of one parameter that a record may hold: kernels, not a table of learned positions."""
RECENT = 5  # log lines whose speed predicts the time that is left


class Metrics:
    """Writes numbers by step to every place that the configuration names; for the first rank alone.

    folder: where metrics.jsonl grows (None: nowhere); settings: the section `logging`;
    config: all keys, for Weights & Biases; resumed_at: the step to continue after, None if new
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Logging,
        config: dict[str, Any],
        *,
        resumed_at: int | None = None,
    ) -> None:
        self.path = None if folder is None else folder / "metrics.jsonl"
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(self.path, resumed_at)
        self.tensorboard = None
        if settings.tensorboard_dir:
            self.tensorboard = _tensorboard(settings.tensorboard_dir, resumed_at)
        self.wandb = _wandb(settings, config, folder) if settings.use_wandb else None

    def log(
        self,
        step: int,
        kind: str,
        numbers: dict[str, Any],
        learned: dict[str, Tensor] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Write one record.

        kind: train, valid or skipped; learned: the encoding's parameters, per head;
        details: plain data for metrics.jsonl alone
        """
        learned = learned or {}
        numbers = {name: _finite(value) for name, value in numbers.items()}
        if self.path is not None:
            record = {"step": step, "kind": kind, **numbers, **(details or {})}
            tables = _small_tables(learned)
            if tables:
                record["position"] = tables
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        scalars = _scalars(kind, numbers, learned)
        if self.tensorboard is not None:
            for name, value in scalars.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(scalars, step=step)

    def close(self) -> None:
        """Write what is still buffered."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


class Progress:
    """Speed of the last steps and the time that is left."""

    def __init__(self, step: int, steps: int) -> None:
        self.steps = steps
        self.first_step = self.last_step = step
        self.moment = _now()
        self.pause = 0.0  # seconds since the last call of `advance`
        self.pauses = 0.0  # seconds since the start
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # steps and their seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A validation or a checkpoint: no part of a step's time, but `remaining` counts it."""
        before = _now()
        yield
        seconds = _now() - before
        self.pause += seconds
        self.pauses += seconds

    def advance(self, step: int) -> float:
        """Seconds per step since the last call."""
        now = _now()
        seconds = now - self.moment - self.pause
        count = max(1, step - self.last_step)
        self.recent.append((count, seconds))
        self.last_step, self.moment, self.pause = step, now, 0.0
        return seconds / count

    def remaining(self) -> str:
        """h:mm:ss to the end: steps at their recent speed, pauses at their mean since the start."""
        recent_steps = sum(count for count, _ in self.recent)
        recent_seconds = sum(seconds for _, seconds in self.recent)
        step = recent_seconds / max(1, recent_steps)
        pause = self.pauses / max(1, self.last_step - self.first_step)
        left = (step + pause) * (self.steps - self.last_step)
        return str(timedelta(seconds=round(left)))


def _now() -> float:
    """Seconds, after the device has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _small_tables(learned: dict[str, Tensor]) -> dict[str, list[float]]:
    """Parameters with few numbers, to six digits."""
    tables = {}
    for name, tensor in learned.items():
        if tensor.numel() <= LARGEST_TABLE:
            values = tensor.flatten().tolist()
            tables[name] = [float(f"{value:.6g}") for value in values]
    return tables


def _scalars(
    kind: str, numbers: dict[str, Any], learned: dict[str, Tensor]
) -> dict[str, float | int]:
    """What a chart can show: every number, and of every parameter its mean and range."""
    scalars = {}
    for name, value in numbers.items():
        if value is not None:
            scalars[f"{kind}/{name}"] = value
    for name, tensor in learned.items():
        scalars[f"position/{name}/mean"] = tensor.mean().item()
        scalars[f"position/{name}/min"] = tensor.min().item()
        scalars[f"position/{name}/max"] = tensor.max().item()
    return scalars


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_room(path: Path, resumed_at: int | None) -> None:
    """Drop the records that a resumed run writes again; a new run renames an old file instead."""
    if not path.exists():
        return
    if resumed_at is None:
        path.rename(_free_name(path))
        return
    kept = [line for line in path.read_text().splitlines() if _step(line) <= resumed_at]
    write_text(path, "".join(line + "\n" for line in kept))


def _free_name(path: Path) -> Path:
    """metrics.1.jsonl, metrics.2.jsonl, …: the first that does not exist."""
    for number in itertools.count(1):
        candidate = path.with_name(f"{path.stem}.{number}.jsonl")
        if not candidate.exists():
            return candidate
    raise AssertionError("numbers do not end")


def _step(line: str) -> float:
    """The step of a record; infinite for a line that was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _tensorboard(folder: str, resumed_at: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    purge_step = resumed_at + 1 if resumed_at else None
    return SummaryWriter(folder, purge_step=purge_step)


def _wandb(settings: Logging, config: dict[str, Any], folder: Path | None) -> Any:
    try:
        import wandb
    except ImportError:
        cure = "pip install wandb, or use_wandb: false"
        raise UserError(f"use_wandb: the package wandb is not installed - {cure}") from None
    server = None
    if settings.wandb_host:
        server = wandb.Settings(base_url=settings.wandb_host)
    return wandb.init(
        project=settings.wandb_project,
        group=settings.wandb_group,
        config=config,
        dir=folder,
        settings=server,
    )
