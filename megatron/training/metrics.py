"""Numbers of a run by step, and the time left."""

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
from megatron.training.metric_logs import logs_of
from megatron.training.records import Record

RECENT = 5  # log lines whose speed predicts the time that is left


class Metrics:
    """Writes numbers by step to every place that the configuration names; for the first rank alone.

    folder: where metrics.jsonl grows (None: nowhere); settings: the section `logging`;
    config: all keys, for Weights & Biases; resumed_at: the step to continue after, None if new
    run_id: of the run of Weights & Biases; None: there is none
    UserError where a place cannot be written at the start; later that is a warning.
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
        self.logs = logs_of(folder, settings, config, resumed_at, run_id)

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
        finite = {name: _finite(value) for name, value in numbers.items()}
        record = Record(step, kind, finite, learned or {}, details or {})
        for log in self.logs:
            log.write(record)

    def close(self) -> None:
        """Write what is still buffered, and warn of what was lost."""
        for log in self.logs:
            log.close()


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


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
