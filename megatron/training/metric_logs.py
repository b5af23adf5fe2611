"""Where the numbers of a run go: a file of JSON lines, tensorboard, Weights & Biases.

No log is worth hours of training: one that fails is a warning, and the run goes on.
"""

import importlib.util
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.schema import Logging
from megatron.errors import UserError, cannot_write
from megatron.files import write_text
from megatron.training.profiling import FOLDER
from megatron.training.records import InBackground, Record, Spared
from megatron.training.weights_and_biases import NAME, PATIENCE, Attachment, Wandb


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
        for name, values in record.finite_values().items():
            self.writer.add_histogram(name, values, record.step)

    def close(self) -> None:
        self.writer.close()


def logs_of(
    folder: Path | None,
    settings: Logging,
    config: dict[str, Any],
    resumed_at: int | None,
    run_id: str | None,
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
    if settings.use_wandb and run_id is not None:
        make = partial(
            Wandb,
            settings,
            config,
            folder,
            run_id,
            is_continued=resumed_at is not None,
            attached=lambda: _attachment(folder, settings, run_id),
        )
        logs.append(Spared(InBackground(NAME, make, PATIENCE), NAME))
    return logs


def _attachment(folder: Path | None, settings: Logging, run_id: str) -> Attachment | None:
    """The files of a training beside its checkpoints, where the configuration asks for them."""
    if not settings.wandb_artifacts or folder is None:
        return None
    files = [folder / "metrics.jsonl", *sorted((folder / FOLDER).glob("*"))]
    learned = learned_rows(folder / "metrics.jsonl")
    last = learned[-1]["step"] if learned else 0
    tables = {"learned": learned} if learned else {}
    return Attachment(f"training-{run_id}", "training", last, files, tables)


def learned_rows(path: Path) -> list[dict[str, Any]]:
    """The encoding's learned numbers by step, of those records that hold them."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, values in record.get("position", {}).items():
            for index, value in enumerate(values):
                row = {"step": record["step"], "name": name, "index": index, "value": value}
                rows.append(row)
    return rows


@contextmanager
def checked_logs(settings: Logging) -> Iterator[None]:
    """UserError where tensorboard's log cannot be had: no package, or a file is in the way."""
    if settings.tensorboard_dir:
        _need("tensorboard", "tensorboard_dir", "leave tensorboard_dir away")
        _try(Path(settings.tensorboard_dir), "tensorboard_dir")
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
