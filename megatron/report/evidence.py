"""What lies beside the rows of a checkpoint: its configuration, its training log, its encoding."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.read import load_model, read_meta
from megatron.config import Config, load
from megatron.config.config import COPY
from megatron.config.load import LARGEST_USER_FILE
from megatron.config.schema import all_keys
from megatron.config.yaml_files import read_file
from megatron.errors import UserError
from megatron.files import read_small
from megatron.model import GPT
from megatron.positions import FILES, REGISTRY, fingerprint
from megatron.positions.layers import Placed
from megatron.results.log import Record, training_log
from megatron.results.row import Question

NOT_FOUND = "not found from here, so configuration, training curve and kernels are not shown"
OWN_CODE = (
    "the encoding is defined in a file of yours, so its kernels are not shown; name the file with"
    f" --from FILE (the checkpoint's own copy {COPY} is never run unasked)"
)
OTHER_CODE = (
    "its kernels are not shown: the file that --from names is not the text that the checkpoint was"
    f" trained with; name that text (the checkpoint has a copy, {COPY})"
)


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
    """The evidence of every checkpoint in some rows. What cannot be read is a gap, no error."""
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
    saved = _saved(folder)
    found.settings = _settings(saved)
    try:
        config, vocab = _configuration(folder, saved)
        found.settings = _settings(config.flat())
        model = load_model(folder, config, vocab)
        found.positions = positions_of(model)
        found.learned = model.learned()
    except UserError as fault:
        found.gaps.append(Gap(name, _cause(fault, folder, saved)))
    log_dir = saved.get("log_dir")
    logs = Path(log_dir) if isinstance(log_dir, str) and log_dir else folder.parent
    try:
        found.metrics = training_log(logs / "metrics.jsonl")
    except (OSError, ValueError) as fault:
        found.gaps.append(Gap(str(logs / "metrics.jsonl"), f"no training curve ({_why(fault)})"))
    return found


def positions_of(model: GPT) -> list[Placed]:
    """The encodings of a model on the CPU, with the layers that have them."""
    return [one._replace(position=one.position.cpu()) for one in model.placed]


def folder_of(name: str, files: Sequence[Path], config_hash: str | None = None) -> Path | None:
    """The folder of a checkpoint: where its row says, or beside the results.

    Beside the results of several models lie checkpoints of the same step. There the hash of the
    configuration must be equal.
    """
    path = Path(name)
    if os.path.exists(path / "checkpoint.json"):  # Path's method raises for a name too long
        return path
    for file in files:
        for place in (file.parent.parent / path.name, file.parent / Path(*path.parts[-2:])):
            if _is_of(place, config_hash):
                return place
    return None


def _is_of(folder: Path, config_hash: str | None) -> bool:
    """Whether a folder is a checkpoint of a configuration, or of any if the hash is not known."""
    try:
        record = read_record(folder)
    except UserError:
        return False
    return config_hash is None or record["config_hash"] == config_hash


def _saved(folder: Path) -> dict[str, Any]:
    """config.yml as it was saved, which needs no encoding; empty where it cannot be read."""
    try:
        return read_file(folder / "config.yml")
    except ValueError:
        return {}


def _settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that shape the result."""
    keys = [key.name for key in all_keys() if key.shapes_result]
    return {key: flat[key] for key in keys if key in flat}


def _configuration(folder: Path, saved: Mapping[str, Any]) -> tuple[Config, int]:
    """(configuration, rows of vocabulary) of a checkpoint.

    A run may name a file of the user's own and still have an encoding of the project. Such a
    configuration is loaded without the file: only its hash needs the text.
    """
    if not (_needs_own_code(folder) and _is_of_the_project(saved.get("pos_emb"))):
        config, meta = read_meta(folder)
        return config, meta["vocab"]
    config = load([folder / "config.yml"], ["pos_emb_file=null"])
    code = read_small(folder / COPY, LARGEST_USER_FILE).decode("utf-8")
    record = read_record(folder)
    if replace(config, pos_emb_code=code).hash != record["config_hash"]:
        raise UserError(f"{folder}/config.yml: it was edited after training")
    return config, record["vocab"]


def _cause(fault: UserError, folder: Path, saved: Mapping[str, Any]) -> str:
    """Why a checkpoint could not be loaded: the same words for the same reason."""
    if not _needs_own_code(folder) or _is_of_the_project(saved.get("pos_emb")):
        return str(fault)
    return OTHER_CODE if FILES else OWN_CODE


def _needs_own_code(folder: Path) -> bool:
    """Whether the checkpoint keeps a file of encodings that this process has not run."""
    try:
        text = read_small(folder / COPY, LARGEST_USER_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return fingerprint(text) not in FILES


def _is_of_the_project(name: object) -> bool:
    """Whether the package itself registers an encoding of this name."""
    encoding = REGISTRY.get(name) if isinstance(name, str) else None
    return encoding is not None and encoding.__module__.startswith("megatron.")


def _why(fault: Exception) -> str:
    return getattr(fault, "strerror", None) or str(fault)
