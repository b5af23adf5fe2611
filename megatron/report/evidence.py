"""What lies beside the rows of a checkpoint: its configuration, its training log, its encoding."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.read import load_model, read_meta
from megatron.config.schema import all_keys
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.positions.layers import Placed
from megatron.results.files import Record, training_log
from megatron.results.row import Question

NOT_FOUND = "not found from here, so configuration, training curve and kernels are not shown"


class Gap(NamedTuple):
    """Something that the page lacks: what it belongs to, and why."""

    where: str
    cause: str


@dataclass
class Evidence:
    """What is known of a checkpoint beside its rows; parts that could not be read are empty.

    settings: the keys that shape the result; metrics: the lines of metrics.jsonl;
    positions: its encodings; learned: what `GPT.learned` gives; gaps: what is missing
    """

    settings: dict[str, Any] = field(default_factory=dict)
    metrics: list[Record] = field(default_factory=list)
    positions: list[Placed] = field(default_factory=list)
    learned: dict[str, Tensor] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)


Found = Mapping[str, Evidence]  # by the checkpoint that rows name


def gathered(rows: Sequence[Question], files: Sequence[Path]) -> dict[str, Evidence]:
    """The evidence of every checkpoint in some rows; what cannot be read is a gap, not an error."""
    hashes = {row.get("checkpoint"): row.get("config_hash") for row in rows}
    return {name: evidence_of(name, files, of_rows) for name, of_rows in hashes.items() if name}


def evidence_of(name: str, files: Sequence[Path], config_hash: str | None = None) -> Evidence:
    """Read what is at hand of one checkpoint.

    files: the results files that name it; config_hash: the one of its rows
    """
    found = Evidence()
    folder = folder_of(name, files, config_hash)
    if folder is None:
        found.gaps.append(Gap(name, NOT_FOUND))
        return found
    saved: dict[str, Any] = {}
    try:
        saved = read_file(folder / "config.yml")
        keys = [key.name for key in all_keys() if key.shapes_result and key.name in saved]
        found.settings = {key: saved[key] for key in keys}
        config, meta = read_meta(folder)
        model = load_model(folder, config, meta["vocab"])
        found.positions = model.placed
        found.learned = model.learned()
    except ValueError as fault:
        found.gaps.append(Gap(name, str(fault)))
    log_dir = saved.get("log_dir")
    log = Path(log_dir if isinstance(log_dir, str) and log_dir else folder.parent) / "metrics.jsonl"
    try:
        found.metrics = training_log(log)
    except (OSError, ValueError) as fault:
        cause = getattr(fault, "strerror", None) or str(fault)
        found.gaps.append(Gap(str(log), f"no training curve ({cause})"))
    return found


def folder_of(name: str, files: Sequence[Path], config_hash: str | None = None) -> Path | None:
    """The folder of a checkpoint: where its row says, or beside the results, or None.

    Beside the results of several models lie checkpoints of the same step. There the hash of the
    configuration must be equal.
    """
    path = Path(name)
    if os.path.exists(path / "checkpoint.json"):  # Path's method raises for a name too long
        return path
    for file in files:
        for place in (file.parent.parent / path.name, file.parent / Path(*path.parts[-2:])):
            try:
                record = read_record(place)
            except UserError:
                continue
            if config_hash in (None, record["config_hash"]):
                return place
    return None
