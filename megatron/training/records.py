"""A record of a run's numbers, and what may go wrong where records are written."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from megatron.errors import in_words

logger = logging.getLogger(__name__)

LARGEST_TABLE = 1024
"""Numbers of one parameter that a record may hold: kernels, not a table of learned positions."""
MOST_WAITING = 10_000  # records for a log that is slower than the training


@dataclass(frozen=True)
class Record:
    """The numbers of one step: see Metrics.log."""

    step: int
    kind: str
    numbers: dict[str, Any]
    learned: dict[str, Tensor] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def kept(self) -> "Record":
        """The same numbers in memory of its own, which later steps do not change."""
        learned = {name: tensor.detach().cpu().clone() for name, tensor in self.learned.items()}
        return replace(self, learned=learned)

    def line(self) -> str:
        """One JSON object, with those parameters of the encoding that are small."""
        record = {"step": self.step, "kind": self.kind, **self.numbers, **self.details}
        tables = {}
        for name, tensor in self.learned.items():
            if tensor.numel() <= LARGEST_TABLE:
                values = tensor.flatten().tolist()
                tables[name] = [float(f"{value:.6g}") for value in values]
        if tables:
            record["position"] = tables
        return json.dumps(record) + "\n"

    def scalars(self) -> dict[str, float | int]:
        """What a chart can show: every number, and of every parameter its mean and range."""
        scalars = {}
        for name, value in self.numbers.items():
            if value is not None:
                scalars[f"{self.kind}/{name}"] = value
        for name, tensor in self.learned.items():
            scalars[f"position/{name}/mean"] = tensor.mean().item()
            scalars[f"position/{name}/min"] = tensor.min().item()
            scalars[f"position/{name}/max"] = tensor.max().item()
        return scalars

    def finite_values(self) -> dict[str, np.ndarray]:
        """Of every parameter all numbers that a histogram can show, in one dimension."""
        found = {}
        for name, tensor in self.learned.items():
            values = tensor.detach().float().flatten().cpu()
            values = values[values.isfinite()]
            if values.numel():
                found[f"position/{name}"] = values.numpy()
        return found


class Log(Protocol):
    """A place that takes records."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Spared:
    """A log whose faults are warnings: one for the first, and one line about all at the end."""

    def __init__(self, log: Log, name: str) -> None:
        self.log = log
        self.name = name
        self.lost = 0

    def write(self, record: Record) -> None:
        """Write a record, or count it as lost."""
        try:
            self.log.write(record)
        except Exception as fault:  # whatever a library or a disk may raise
            self.lost += 1
            if self.lost == 1:
                logger.warning(
                    f"{self.name}: step {record.step} could not be written ({in_words(fault)})"
                    " - training goes on, and later records are tried again"
                )

    def close(self) -> None:
        """Write what is still buffered, and say how much was lost."""
        try:
            self.log.close()
        except Exception as fault:
            logger.warning(f"{self.name}: could not be closed ({in_words(fault)})")
        if self.lost:
            logger.warning(f"{self.name}: {self.lost} record(s) were lost")


class InBackground:
    """A log in a thread of its own: whoever writes waits for no service and no network.

    name: in messages; make: starts the log, in that thread; its faults are warnings, as those of
    `Spared`
    patience: seconds that `close` waits for what is still to be written
    """

    def __init__(self, name: str, make: Callable[[], Log], patience: float) -> None:
        self.name, self.make, self.patience = name, make, patience
        self.waiting: SimpleQueue[Record | None] = SimpleQueue()
        self.thread = Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def write(self, record: Record) -> None:
        """Hand a record over; BufferError where too many wait already."""
        if not self.thread.is_alive():
            return  # it could not start, which is said
        if self.waiting.qsize() >= MOST_WAITING:
            raise BufferError(f"{MOST_WAITING} records wait already")
        self.waiting.put(record.kept())

    def close(self) -> None:
        """Wait for the thread, but not for ever; TimeoutError where it still works then."""
        self.waiting.put(None)
        self.thread.join(self.patience)
        if self.thread.is_alive():
            raise TimeoutError(f"not ready after {self.patience:g} seconds")

    def _work(self) -> None:
        try:
            log = Spared(self.make(), self.name)
        except Exception as fault:  # whatever a library may raise
            logger.warning(
                f"{self.name}: cannot start ({in_words(fault)}) - the run goes on without it"
            )
            return
        while (record := self.waiting.get()) is not None:
            log.write(record)
        log.close()
