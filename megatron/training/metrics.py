"""What a run says about itself: a console line, JSON lines, tensorboard and Weights & Biases."""

import itertools
import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import Logging
from megatron.errors import UserError

logger = logging.getLogger(__name__)

READABLE = 1024  # numbers of one parameter that are written out per head; a table of learned positions is not


class Metrics:
    """Writes numbers by step to every place that the configuration asks for; meant for the first rank alone.

    folder: where metrics.jsonl grows (None: nowhere); settings: the configuration's section `logging`;
    config: all keys, for Weights & Biases; resumed_at: the step to continue after, None for a new run
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
        self.tensorboard = (
            _tensorboard(settings.tensorboard_dir, resumed_at) if settings.tensorboard_dir else None
        )
        self.wandb = _wandb(settings, config, folder) if settings.use_wandb else None

    def log(
        self,
        step: int,
        kind: str,
        numbers: dict[str, Any],
        learned: dict[str, Tensor] | None = None,
    ) -> None:
        """One record: `kind` is train or valid; `learned` are the encoding's parameters, per head."""
        numbers = {name: _finite(value) for name, value in numbers.items()}
        if self.path is not None:
            tables = {
                name: _rounded(tensor)
                for name, tensor in (learned or {}).items()
                if tensor.numel() <= READABLE
            }
            record = {
                "step": step,
                "kind": kind,
                **numbers,
                **({"position": tables} if tables else {}),
            }
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        scalars = {f"{kind}/{name}": value for name, value in numbers.items() if value is not None}
        for name, tensor in (learned or {}).items():
            scalars |= {
                f"position/{name}/{word}": getattr(tensor, word)().item()
                for word in ("mean", "min", "max")
            }
        if self.tensorboard is not None:
            for name, value in scalars.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(scalars, step=step)

    def close(self) -> None:
        """Write out what is still on the way."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


class Progress:
    """Speed and remaining time from the steps since this object was made."""

    def __init__(self, step: int, steps: int) -> None:
        self.steps = steps
        self.first, self.start = step, _now()
        self.last, self.moment, self.elsewhere = step, self.start, 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside, a validation or a checkpoint, is no part of a step; `remaining` still counts it."""
        before = _now()
        yield
        self.elsewhere += _now() - before

    def advance(self, step: int) -> float:
        """Seconds per step since the last call."""
        now = _now()
        seconds, self.moment = now - self.moment - self.elsewhere, now
        count, self.last, self.elsewhere = step - self.last, step, 0.0
        return seconds / max(1, count)

    def remaining(self) -> str:
        """h:mm:ss to the end at the mean speed so far."""
        mean = (self.moment - self.start) / max(1, self.last - self.first)
        return str(timedelta(seconds=round(mean * (self.steps - self.last))))


def _now() -> float:
    """Seconds, when the device has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _rounded(tensor: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in tensor.flatten().tolist()]


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_room(path: Path, resumed_at: int | None) -> None:
    """Drop records after the step that a run resumes at: it will write them again. A new run moves an old file away."""
    if not path.exists():
        return
    if resumed_at is None:
        number = next(
            n for n in itertools.count(1) if not path.with_name(f"{path.stem}.{n}.jsonl").exists()
        )
        path.rename(path.with_name(f"{path.stem}.{number}.jsonl"))
        return
    kept = [line for line in path.read_text().splitlines() if _step(line) <= resumed_at]
    fresh = path.with_suffix(".partial")
    fresh.write_text("".join(line + "\n" for line in kept))
    fresh.replace(path)


def _step(line: str) -> float:
    """The step of a record; infinite for a line that was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _tensorboard(folder: str, resumed_at: int | None) -> Any:
    from torch.utils.tensorboard import (
        SummaryWriter,  # slow to import, and not everybody writes events
    )

    return SummaryWriter(folder, purge_step=resumed_at + 1 if resumed_at else None)


def _wandb(settings: Logging, config: dict[str, Any], folder: Path | None) -> Any:
    try:
        import wandb
    except ImportError:
        cure = "pip install wandb, or use_wandb: false"
        raise UserError(f"use_wandb: the package wandb is not installed - {cure}") from None
    return wandb.init(
        project=settings.wandb_project,
        group=settings.wandb_group,
        config=config,
        dir=folder,
        settings=wandb.Settings(base_url=settings.wandb_host) if settings.wandb_host else None,
    )
