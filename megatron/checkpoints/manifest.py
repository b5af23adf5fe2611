"""checkpoint.json: what a checkpoint is, and the size and SHA-256 of each of its files.

It is written last. Its own last line is the SHA-256 of its text, so damage to it is noticed too.
These sums notice damage. They do not prove who wrote the files.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.config.schema import Parent
from megatron.errors import UserError, control_fault, in_words
from megatron.files import read_small, write_text

logger = logging.getLogger(__name__)

RECORD = "checkpoint.json"
FOLDER = re.compile(r"global_step(\d+)")
WEIGHTS = "model.safetensors"
SETTINGS = "config.yml"
OPTIMIZER = "optimizer.safetensors"  # for resuming alone
TOKENIZER = "tokenizer"  # folder of a run that was imported
SUM = "sha256"
NO_SUM = "0" * 64  # stands in the text whose sum is taken
LARGEST_RECORD = 64 * 2**20  # bytes; a record of a million unlogged losses has 20
THREADS = 4  # that read and hash files at a time
SHOWN = 3  # faults in one message

Entries = dict[str, dict[str, Any]]  # file name -> {"bytes": its size, "sha256": hex digits}


class Damaged(UserError):
    """A checkpoint that is not as it was written.

    faults: one sentence for each, which begins with the file
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__(
            f"{'; '.join(self.faults[:SHOWN])} - copy the checkpoint again, or take another one:"
            " tools/inspect_files.py shows which are whole"
        )


Count = Annotated[int, Field(ge=0, lt=2**63)]
Steps = Annotated[int, Field(ge=0, le=10**9)]


class FileEntry(BaseModel):
    bytes: Count
    sha256: str


class CheckpointRecord(BaseModel):
    """The entries of checkpoint.json: a hand or an old program may have written them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    step: Steps
    config_hash: str
    vocab: Annotated[int, Field(gt=0, lt=2**63)]
    windows: Count = 0
    windows_per_step: Count | None = None
    ranks: Count = 1
    threads: Count | None = None
    pending_losses: list[float] = []
    tokenizer: dict[str, Any] | None = None
    corpora: list[dict[str, Any]] = []
    parent: Parent | None = None
    parent_model: str | None = None
    # It becomes a part of an address and the name of a folder.
    wandb: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    files: dict[Annotated[str, Field(pattern=r"^[^/\x00]+$")], FileEntry] = {}


def entry_of(path: Path) -> dict[str, Any]:
    """The entry of a file in a record: its size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write checkpoint.json of a folder, with the SHA-256 of its text at the end."""
    facts = {key: value for key, value in record.items() if key != SUM}
    text = json.dumps({**facts, SUM: NO_SUM}, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(path / RECORD, text.replace(NO_SUM, digest))


def read_record(path: Path) -> dict[str, Any]:
    """checkpoint.json of a folder global_stepN; raises Damaged unless it is as it was written."""
    file = path / RECORD
    if not os.path.exists(file):  # Path's method raises for a name that is too long
        raise Damaged([f"{file}: is missing"])
    try:
        text = read_small(file, LARGEST_RECORD)
        record = json.loads(text.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise Damaged([f"{file}: not readable ({in_words(fault)})"]) from None
    if not isinstance(record, dict):
        raise Damaged([f"{file}: not readable (no mapping)"])
    if is_verifiable(record):
        written_sum = str(record.get(SUM))
        text = text.replace(written_sum.encode(), NO_SUM.encode())
        if hashlib.sha256(text).hexdigest() != written_sum:
            raise Damaged([f"{file}: was changed after it was written"])
    try:
        CheckpointRecord.model_validate(record)
    except ValidationError as fault:
        name, *_ = fault.errors()[0]["loc"]
        if name not in record:
            raise Damaged([f"{file}: not readable (no {name} in it)"]) from None
        raise Damaged([f"{file}: {name} is {record[name]!r:.40}, which cannot be"]) from None
    for name, value in record.items():
        if control_fault(value):
            raise Damaged([f"{file}: {name} has a control character, and no row can repeat it"])
    named = FOLDER.fullmatch(path.name)
    if named and int(named[1]) != record["step"]:
        raise Damaged([f"{file}: is the one of step {record['step']}"])
    return record


def is_verifiable(record: Mapping[str, Any]) -> bool:
    """Whether a record has sums; those of old checkpoints have none."""
    return SUM in record or "files" in record


def imported_class(record: Mapping[str, Any]) -> str | None:
    """Hugging Face's class that the weights were imported from, or None: their seed is unknown."""
    origin = record.get("origin") or {}
    return origin.get("architecture") if origin.get("kind") == "huggingface" else None


def weights_of(path: Path, record: Mapping[str, Any]) -> str:
    """12 hex digits of a checkpoint's file of weights; a record with sums saves the reading."""
    entry = record.get("files", {}).get(WEIGHTS) or entry_of(path / WEIGHTS)
    return entry["sha256"][:12]


def note_opened(path: Path, record: Mapping[str, Any]) -> None:
    """Log what a checkpoint holds, and that its files cannot be verified where that is so."""
    logger.info("%s: step %d, config %s", path, record["step"], record["config_hash"])
    if not is_verifiable(record):
        logger.info("%s: written before checkpoints had sums, so its files are not verified", path)


def can_continue(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether a checkpoint should have the optimizer's state; an old one just has it or not."""
    if is_verifiable(record):
        return OPTIMIZER in record["files"]
    return (path / OPTIMIZER).exists()


def faults_of(path: Path, names: Collection[str] | None = None) -> list[str]:
    """Faults of a checkpoint, one sentence for each file; [] if there are none.

    names: look at these files alone, where the checkpoint lists them; None for all
    Of an old checkpoint without sums only what every reader needs can be missing or empty.
    """
    try:
        record = read_record(path)
    except Damaged as damage:
        return damage.faults
    entries: dict[str, Mapping[str, Any]] = {WEIGHTS: {}, SETTINGS: {}}
    if is_verifiable(record):
        entries = record["files"]
    if names is not None:
        entries = {name: entry for name, entry in entries.items() if name in names}
    files = [path / name for name in entries]
    with ThreadPoolExecutor(THREADS) as pool:
        return [*filter(None, pool.map(_fault, files, entries.values()))]


def _fault(file: Path, entry: Mapping[str, Any]) -> str | None:
    if not os.path.exists(file):
        return f"{file}: is missing"
    if not file.is_file():
        return f"{file}: is not a file"
    size = file.stat().st_size
    if not entry:
        return None if size else f"{file}: is empty"
    if size != entry["bytes"]:
        return f"{file}: has {size:,} bytes, {entry['bytes']:,} were written"
    try:
        digest = entry_of(file)["sha256"]
    except OSError as fault:
        return f"{file}: cannot be read ({in_words(fault)})"
    return None if digest == entry["sha256"] else f"{file}: was changed after it was written"


def check_files(path: Path, names: Collection[str] | None = None) -> None:
    """Raises Damaged unless files of a checkpoint are as they were written; see `faults_of`."""
    faults = faults_of(path, names)
    if faults:
        raise Damaged(faults)
