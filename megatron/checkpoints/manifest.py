"""checkpoint.json: what a checkpoint is, and the size and SHA-256 of each of its files.

It is written last. Its own last line is the SHA-256 of its text, so damage to it is detected too.
These sums detect damage; they don't prove who wrote the files.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from megatron.config.schema import Parent
from megatron.errors import UserError, control_fault, in_words
from megatron.files import check_regular, read_small, sha256_of, write_text

logger = logging.getLogger(__name__)

RECORD = "checkpoint.json"
FOLDER = re.compile(r"global_step(\d+)")
WEIGHTS = "model.safetensors"
SETTINGS = "config.yml"
OPTIMIZER = "optimizer.safetensors"  # only needed for resuming
TOKENIZER = "tokenizer"  # folder of an imported run
SUM = "sha256"
NO_SUM = "0" * 64  # replaces the sum in the text while it is computed
LARGEST_RECORD = 64 * 2**20  # bytes; a record of a million unlogged losses has 20
SHOWN = 3  # most faults in one message

Entries = dict[str, dict[str, Any]]  # file name -> {"bytes": its size, "sha256": hex digits}


class Damaged(UserError):
    """A checkpoint that has changed since it was written.

    faults: one sentence per fault; each begins with the file
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__(
            f"{'; '.join(self.faults[:SHOWN])} - copy the checkpoint again, or use another one:"
            " tools/inspect_files.py shows which are undamaged"
        )


class FileEntry(BaseModel):
    bytes: int
    sha256: str


class CheckpointRecord(BaseModel, strict=True, extra="allow"):
    """The entries of checkpoint.json that are always required."""

    step: Annotated[int, Field(ge=0, le=10**9)]
    config_hash: str
    vocab: Annotated[int, Field(gt=0)]
    tokenizer: dict[str, Any] | None = None
    parent: Parent | None = None
    files: dict[str, FileEntry]


def entry_of(path: Path) -> dict[str, Any]:
    """A file's entry in a record: its size and SHA-256."""
    check_regular(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write checkpoint.json of a folder, with the SHA-256 of its text at the end."""
    facts = {key: value for key, value in record.items() if key != SUM}
    text = json.dumps({**facts, SUM: NO_SUM}, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(path / RECORD, text.replace(NO_SUM, digest))


def read_record(path: Path) -> dict[str, Any]:
    """checkpoint.json of a folder global_stepN; raises Damaged if it was changed."""
    file = path / RECORD
    if not os.path.exists(file):  # Path's method raises an error for a name that is too long
        raise Damaged([f"{file}: is missing"])
    try:
        text = read_small(file, LARGEST_RECORD)
        record = json.loads(text)
        CheckpointRecord.model_validate(record)
    except (OSError, ValueError, RecursionError) as fault:
        raise Damaged([f"{file}: not readable ({in_words(fault)})"]) from None
    written_sum = str(record.get(SUM))
    text = text.replace(written_sum.encode(), NO_SUM.encode())
    if hashlib.sha256(text).hexdigest() != written_sum:
        raise Damaged([f"{file}: was changed after it was written"])
    tokenizer = record.get("tokenizer") or {}
    shown = {**record, "tokenizer": {**tokenizer, "chat_template": ""}}  # a template has lines
    if fault := control_fault(shown):
        raise Damaged([f"{file}: {fault}"])
    named = FOLDER.fullmatch(path.name)
    if named and int(named[1]) != record["step"]:
        raise Damaged([f"{file}: belongs to step {record['step']}"])
    return record


def imported_class(record: Mapping[str, Any]) -> str | None:
    """Hugging Face's class that the weights were imported from (then their seed is unknown), or
    None."""
    origin = record.get("origin") or {}
    return origin.get("architecture") if origin.get("kind") == "huggingface" else None


def weights_of(path: Path, record: Mapping[str, Any]) -> str:
    """12 hex digits of a checkpoint's weights file, from its record if possible."""
    entry = record["files"].get(WEIGHTS) or entry_of(path / WEIGHTS)
    return entry["sha256"][:12]


def note_opened(path: Path, record: Mapping[str, Any]) -> None:
    """Log what a checkpoint holds."""
    logger.info("%s: step %d, config %s", path, record["step"], record["config_hash"])


def faults_of(path: Path, names: Collection[str] | None = None) -> list[str]:
    """The faults of a checkpoint, one sentence per file; [] if there are none.

    names: check only these files, if the checkpoint lists them; None for all
    """
    try:
        entries = read_record(path)["files"]
    except Damaged as damage:
        return damage.faults
    faults = []
    for name, entry in entries.items():
        file = path / name
        if names is not None and name not in names:
            continue
        try:
            size, digest = entry_of(file).values()
        except (OSError, UserError) as fault:
            faults.append(f"{file}: cannot be read ({in_words(fault)})")
            continue
        if size != entry["bytes"]:
            faults.append(f"{file}: has {size:,} bytes, but {entry['bytes']:,} were written")
        elif digest != entry["sha256"]:
            faults.append(f"{file}: was changed after it was written")
    return faults


def check_files(path: Path, names: Collection[str] | None = None) -> None:
    """Raises Damaged if files of a checkpoint have changed; see `faults_of`."""
    faults = faults_of(path, names)
    if faults:
        raise Damaged(faults)
