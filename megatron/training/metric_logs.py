"""Where the numbers of a run go: a file of JSON lines, tensorboard, Weights & Biases.

No log is worth hours of training: one that fails is a warning, and the run goes on.
"""

import importlib.util
import itertools
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from megatron.config.schema import Logging
from megatron.errors import UserError, cannot_write, in_words
from megatron.files import write_text

logger = logging.getLogger(__name__)

LARGEST_TABLE = 1024
"""Numbers of one parameter that a record may hold: kernels, not a table of learned positions."""
WANDB_STARTS = 15  # seconds in which its server must answer; it gives up 12 seconds later
WANDB_ENDS = 60  # seconds for what is still to be sent at the end


@dataclass(frozen=True)
class Record:
    """The numbers of one step: see Metrics.log."""

    step: int
    kind: str
    numbers: dict[str, Any]
    learned: dict[str, Tensor] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

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


class JsonLines:
    """metrics.jsonl: whole lines alone, also where the disk is full in the middle of one."""

    def __init__(self, path: Path, resumed_at: int | None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(path, resumed_at)
        except OSError as fault:
            raise cannot_write(path, fault) from None

    def write(self, record: Record) -> None:
        """Append one line; OSError leaves the file as it was."""
        remaining = record.line().encode()
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            except OSError:
                file.truncate(end)
                raise

    def close(self) -> None:
        """Every line is written at once, so nothing is left to do."""


class Tensorboard:
    """Events for tensorboard."""

    def __init__(self, folder: str, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge_step = resumed_at + 1 if resumed_at else None
        try:
            self.writer = SummaryWriter(folder, purge_step=purge_step)
        except OSError as fault:
            raise cannot_write(f"tensorboard_dir: {folder}", fault) from None

    def write(self, record: Record) -> None:
        for name, value in record.scalars().items():
            self.writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases; kept on this machine where its server cannot be reached."""

    def __init__(self, settings: Logging, config: dict[str, Any], folder: Path | None) -> None:
        import wandb  # slow to import

        def started(mode: Literal["offline"] | None = None) -> Any:
            return wandb.init(
                project=settings.wandb_project,
                group=settings.wandb_group,
                config=config,
                dir=folder,
                settings=_wandb_settings(settings),
                mode=mode,
            )

        self.wandb = wandb
        try:
            self.run = started()
        except Exception as fault:  # no network, no key, no rights, an answer that it cannot read
            place = "wandb" if folder is None else folder / "wandb"
            logger.warning(
                f"use_wandb: the server cannot be used ({in_words(fault)}) - training goes on;"
                f" the records are kept in {place}, and `wandb sync` sends them later"
            )
            self.run = started("offline")

    def write(self, record: Record) -> None:
        self.run.log(record.scalars(), step=record.step)

    def close(self) -> None:
        try:
            self.run.finish()
        finally:
            self.wandb.teardown()  # else it is tried at the end of the process, with a traceback


def _wandb_settings(settings: Logging) -> Any:
    import wandb

    limits = wandb.Settings(init_timeout=WANDB_STARTS, finish_timeout=WANDB_ENDS)
    if settings.wandb_host:
        limits.base_url = settings.wandb_host
    return limits


def logs_of(
    folder: Path | None, settings: Logging, config: dict[str, Any], resumed_at: int | None
) -> list[Spared]:
    """Every log that the configuration names; UserError where a disk refuses one at the start.

    Arguments are those of Metrics.
    """
    logs = []
    if folder is not None:
        path = folder / "metrics.jsonl"
        logs.append(Spared(JsonLines(path, resumed_at), str(path)))
    if settings.tensorboard_dir:
        events = Tensorboard(settings.tensorboard_dir, resumed_at)
        logs.append(Spared(events, f"tensorboard_dir: {settings.tensorboard_dir}"))
    if settings.use_wandb:
        try:
            logs.append(Spared(Wandb(settings, config, folder), "use_wandb"))
        except Exception as fault:
            logger.warning(f"use_wandb: cannot start ({in_words(fault)}) - training goes without")
    return logs


@contextmanager
def checked_logs(settings: Logging) -> Iterator[None]:
    """UserError where a log cannot be had: its package is missing, or a file is in the way."""
    if settings.tensorboard_dir:
        _need("tensorboard", "tensorboard_dir", "leave tensorboard_dir away")
        _try(Path(settings.tensorboard_dir), "tensorboard_dir")
    if settings.use_wandb:
        _need("wandb", "use_wandb", "use_wandb: false")
    yield


def _need(package: str, key: str, otherwise: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key}: the package {package} is not installed - pip install {package}, or {otherwise}"
        )


def _try(folder: Path, key: str) -> None:
    """Write to a folder, or to the one in which it will be made; nothing is left there."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
    except OSError as fault:
        raise cannot_write(f"{key}: {folder}", fault) from None


def _make_room(path: Path, resumed_at: int | None) -> None:
    """Drop the records that a resumed run writes again; a new run renames an old file instead."""
    if not path.exists():
        return
    if resumed_at is None:
        path.rename(_free_name(path))
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _step(line) <= resumed_at]
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
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
