"""What can be found of a checkpoint beside its rows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.config.schema import all_keys
from megatron.errors import UserError
from megatron.positions import Position
from megatron.results.row import Row
from megatron.training.checkpoint import find, load_for_evaluation, read_meta


@dataclass
class Evidence:
    """What was found of a checkpoint beside its rows; empty where it was not, and `gaps` say so.

    settings: the keys that shape the result; metrics: the lines of metrics.jsonl; positions: the encoding of each layer
    """

    settings: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    learned: dict[str, Tensor] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


Found = Mapping[str, Evidence]  # by the checkpoint that rows name


def gathered(rows: Sequence[Row], files: Sequence[Path]) -> dict[str, Evidence]:
    """What can be found of every checkpoint that rows name; whatever is not there is a gap, not a fault."""
    names = dict.fromkeys(row["checkpoint"] for row in rows if row.get("checkpoint"))
    return {name: evidence_of(name, files) for name in names}


def evidence_of(name: str, files: Sequence[Path]) -> Evidence:
    found = Evidence()
    folder = next(
        (place for place in places(name, files) if (place / "checkpoint.json").exists()), None
    )
    if folder is None:
        found.gaps.append(
            f"{name}: not found from here, so its configuration, training and kernel are not shown"
        )
        return found
    try:
        config, _ = read_meta(folder)
        flat = config.flat()
        keys = [key.name for key in all_keys() if key.said.get("shapes_result", True)]
        found.settings = {key: flat[key] for key in keys if key in flat}
        model, _, _ = load_for_evaluation(find(folder))
        found.positions, found.learned = [one.cpu() for one in model.positions], model.learned()
    except UserError as fault:
        found.gaps.append(str(fault))
    logs = found.settings and config.logging.log_dir
    path = (Path(logs) if logs else folder.parent) / "metrics.jsonl"
    try:
        found.metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as fault:
        found.gaps.append(f"{path}: no training curve ({fault})")
    return found


def places(name: str, files: Sequence[Path]) -> list[Path]:
    """Where a checkpoint may lie: where its row says, or beside the results, of a run or of a sweep."""
    path = Path(name)
    moved = [
        root
        for file in files
        for root in (file.parent.parent / path.name, file.parent / Path(*path.parts[-2:]))
    ]
    return [path, *moved]
