"""checkpoint.json: what a checkpoint is, and the size and SHA-256 of each of its files.

It is written last. Its own last line is the SHA-256 of its text, so damage to it is noticed too.
These sums notice damage. They do not prove who wrote the files.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.files import read_small, write_text

logger = logging.getLogger(__name__)

RECORD = "checkpoint.json"
FOLDER = re.compile(r"global_step(\d+)")
WEIGHTS = "model.safetensors"
SETTINGS = "config.yml"
WEIGHTS_AND_SETTINGS = frozenset({WEIGHTS, SETTINGS})
ENGINE_STATE = "*_states.pt"  # DeepSpeed's files in a checkpoint, for resuming alone
SUM = "sha256"
NO_SUM = "0" * 64  # stands in the text whose sum is taken
LARGEST_RECORD = 64 * 2**20  # bytes; a record of a million unlogged losses has 20
THREADS = 4  # that read and hash files at a time
WORTH_A_LINE = 4 * 2**30  # bytes to verify that take seconds
MOST_STEPS = 10**9  # of a training, as the configuration has it
SHOWN = 3  # faults in one message

Entries = dict[str, dict[str, Any]]  # file name -> {"bytes": its size, "sha256": hex digits}
Stamps = dict[str, tuple[int, int, int] | None]


class Damaged(UserError):
    """A checkpoint that is not as it was written.

    faults: one sentence for each, which begins with the file
    """

    def __init__(self, faults: Sequence[str], advice: str = "copy the checkpoint again") -> None:
        self.faults = list(faults)
        shown = "; ".join(self.faults[:SHOWN])
        if len(self.faults) > SHOWN:
            shown += f"; {len(self.faults) - SHOWN} more"
        super().__init__(f"{shown} - {advice}")


def entry_of(path: Path) -> dict[str, Any]:
    """What a record says of a file: its size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write checkpoint.json of a folder, with the SHA-256 of its text at the end."""
    facts = {key: value for key, value in record.items() if key != SUM}
    text = json.dumps({**facts, SUM: NO_SUM}, indent=1) + "\n"
    write_text(path / RECORD, text.replace(NO_SUM, _sum_of(text.encode())))


def _sum_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def read_record(path: Path) -> dict[str, Any]:
    """checkpoint.json of a folder global_stepN; Damaged where it is not as it was written."""
    file = path / RECORD
    if not os.path.exists(file):  # Path's method raises for a name that is too long
        raise Damaged([f"{file}: is missing"])
    record = _parsed(file)
    wrong = [key for key, is_right in KINDS.items() if key in record and not is_right(record[key])]
    missing = [key for key in NEEDED if key not in record]
    if missing:
        raise Damaged([f"{file}: not readable (no {missing[0]} in it)"])
    if wrong:
        raise Damaged([f"{file}: {wrong[0]} is {record[wrong[0]]!r:.40}, which cannot be"])
    named = FOLDER.fullmatch(path.name)
    if named and int(named[1]) != record["step"]:
        raise Damaged([f"{file}: is the one of step {record['step']}"])
    return record


def _parsed(file: Path) -> dict[str, Any]:
    """The record in a file whose text has the sum that it says, or says none at all."""
    try:
        text = read_small(file, LARGEST_RECORD)
        record = json.loads(text.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise Damaged([f"{file}: not readable ({_short(fault)})"]) from None
    if not isinstance(record, dict):
        raise Damaged([f"{file}: not readable (no mapping)"])
    if is_verifiable(record):
        said = str(record.get(SUM))
        if _sum_of(text.replace(said.encode(), NO_SUM.encode())) != said:
            raise Damaged([f"{file}: was changed after it was written"])
    return record


def is_verifiable(record: Mapping[str, Any]) -> bool:
    """Whether a record has sums; those of old checkpoints have none."""
    return SUM in record or "files" in record


def _short(fault: BaseException) -> str:
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def weights_of(path: Path, record: Mapping[str, Any]) -> str:
    """12 hex digits of a checkpoint's file of weights; a record with sums saves the reading."""
    entry = record.get("files", {}).get(WEIGHTS) or entry_of(path / WEIGHTS)
    return entry["sha256"][:12]


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_losses(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(loss) for loss in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


def _is_tokenizer(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_parent(value: Any) -> bool:
    """Whether this is the parent of a fine-tuning: {path, step, config_hash, weights}."""
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        return False
    if value["step"] > MOST_STEPS:
        return False
    return all(_is_text(value.get(key)) for key in ("path", "config_hash", "weights"))


def _are_entries(value: Any) -> bool:
    """Whether these are files of one folder with sizes and sums."""
    if not isinstance(value, dict):
        return False
    for name, entry in value.items():
        if Path(name).name != name or not isinstance(entry, dict):
            return False
        if not _is_count(entry.get("bytes")) or not _is_text(entry.get("sha256")):
            return False
    return True


def _is_noise_scale(value: Any) -> bool:
    """Moving averages of training/noise_scale.py."""
    if not isinstance(value, dict) or not _is_count(value.get("groups")):
        return False
    averages = (value.get("trace"), value.get("square"))
    return all(isinstance(average, float) and math.isfinite(average) for average in averages)


def _is_wandb_id(value: Any) -> bool:
    """It becomes a part of an address and the name of a folder."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value) is not None


NEEDED = ("step", "config_hash", "vocab")  # what every checkpoint.json says
KINDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "config_hash": _is_text,
    "vocab": _is_positive,
    "windows": _is_count,
    "windows_per_step": _is_count_or_none,
    "ranks": _is_count,
    "threads": _is_count_or_none,
    "skipped": _is_count,
    "pending_losses": _are_losses,
    "tokenizer": _is_tokenizer,
    "parent": _is_parent,
    "parent_model": _is_text_or_none,
    "proven": _is_count_or_none,
    "usual_loss": _is_number_or_none,
    "last_loss": _is_number_or_none,
    "noise_scale": _is_noise_scale,
    "wandb": _is_wandb_id,
    "files": _are_entries,
}
"""What each entry of checkpoint.json may be; a hand or an old program may have written it."""


def note_opened(path: Path, record: Mapping[str, Any]) -> None:
    """Log what a checkpoint holds, and that its files cannot be verified where that is so."""
    step, vocab, config_hash = record["step"], record["vocab"], record["config_hash"]
    logger.info("%s: step %d, %d rows of vocabulary, config %s", path, step, vocab, config_hash)
    if not is_verifiable(record):
        logger.info("%s: written before checkpoints had sums, so its files are not verified", path)


def engine_files(path: Path, record: Mapping[str, Any]) -> list[str]:
    """The engine's files that a checkpoint should have; those of an old one are what it has."""
    names = record["files"] if is_verifiable(record) else (file.name for file in path.iterdir())
    return sorted(name for name in names if Path(name).match(ENGINE_STATE))


def faults_of(
    path: Path, names: Iterable[str] | None = None, *, part: int = 0, parts: int = 1
) -> list[str]:
    """What is wrong with a checkpoint, one sentence for each file; [] where nothing is.

    names: look at these files alone, where the checkpoint lists them; None for all. Then files of
    the engine that are not listed are faults too.
    part, parts: hash one of several parts of the files; each of several ranks takes its own
    Of an old checkpoint without sums only what every reader needs can be missing or empty.
    """
    try:
        record = read_record(path)
    except Damaged as damage:
        return damage.faults
    if not is_verifiable(record):
        return _absent(path, WEIGHTS_AND_SETTINGS if names is None else names)
    entries: Entries = record["files"]
    faults = []
    if names is None:
        faults += _surplus(path, entries)
    else:
        wanted = set(names)
        entries = {name: entry for name, entry in entries.items() if name in wanted}
    return faults + _changed(path, _share(entries, part, parts))


def _absent(path: Path, names: Iterable[str]) -> list[str]:
    faults = []
    for name in WEIGHTS_AND_SETTINGS & set(names):
        file = path / name
        if not file.is_file():
            faults.append(f"{file}: is missing")
        elif not file.stat().st_size:
            faults.append(f"{file}: is empty")
    pipes = [file for file in path.glob(ENGINE_STATE) if not file.is_file()]
    faults += [f"{file}: is no file" for file in pipes]
    return sorted(faults)


def _surplus(path: Path, entries: Entries) -> list[str]:
    """Engine files of another run or number of ranks. Weights alone have lost theirs on purpose."""
    listed = {name for name in entries if Path(name).match(ENGINE_STATE)}
    if not listed:
        return []
    existing = sorted(file.name for file in path.glob(ENGINE_STATE))
    return [f"{path}/{name}: is not of this checkpoint" for name in existing if name not in listed]


def _share(entries: Entries, part: int, parts: int) -> Entries:
    """One of several parts of nearly equal size."""
    by_size = sorted(entries, key=lambda name: (-entries[name]["bytes"], name))
    sizes = [0] * parts
    chosen = {}
    for name in by_size:
        smallest = sizes.index(min(sizes))
        sizes[smallest] += entries[name]["bytes"]
        if smallest == part:
            chosen[name] = entries[name]
    return chosen


def _changed(path: Path, entries: Entries) -> list[str]:
    """What is wrong with listed files: sizes first, so that most damage costs no reading."""
    faults = [_wrong_size(path / name, entry["bytes"]) for name, entry in entries.items()]
    faults = [fault for fault in faults if fault]
    if faults:
        return faults
    size = sum(entry["bytes"] for entry in entries.values())
    if size > WORTH_A_LINE:
        logger.info("%s: verifying %.1f GiB", path, size / 2**30)
    with ThreadPoolExecutor(THREADS) as pool:
        files = [path / name for name in entries]
        faults = list(pool.map(_wrong_content, files, entries.values()))
    return [fault for fault in faults if fault]


def wrong_sizes(path: Path, record: Mapping[str, Any]) -> list[str]:
    """Faults that need no reading: files that are missing, surplus or of another size."""
    entries: Entries = record.get("files", {})
    sizes = [_wrong_size(path / name, entry["bytes"]) for name, entry in entries.items()]
    return _surplus(path, entries) + [fault for fault in sizes if fault]


def _wrong_size(file: Path, size: int) -> str:
    try:
        now = file.stat().st_size
    except OSError:
        return f"{file}: is missing"
    if not file.is_file():
        return f"{file}: is no file"
    return "" if now == size else f"{file}: has {now:,} bytes, {size:,} were written"


def _wrong_content(file: Path, entry: Mapping[str, Any]) -> str:
    try:
        now = entry_of(file)
    except OSError as fault:
        return f"{file}: cannot be read ({_short(fault)})"
    same = now["sha256"] == entry["sha256"]
    return "" if same else f"{file}: was changed after it was written"


def stamps(path: Path, names: Iterable[str] | None = None) -> Stamps:
    """What changes when somebody writes to files of a folder or puts others in their place."""
    if names is None:
        names = [file.name for file in path.iterdir()]
    return {name: _stamp(path / name) for name in names}


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_unchanged(path: Path, before: Stamps) -> None:
    """Damaged where a file was written or replaced since its stamp was taken."""
    now = stamps(path, before)
    changed = [name for name in before if now[name] != before[name]]
    if changed:
        raise Damaged(
            [f"{path}/{name}: changed while it was read" for name in changed],
            "let one process at a time write there",
        )


@contextmanager
def verified(path: Path, *names: str) -> Iterator[None]:
    """Check these files of a checkpoint before the block that reads them, and their stamps after.

    Damaged where they are not as they were written, or change meanwhile.
    """
    before = stamps(path, [RECORD, *names])
    faults = faults_of(path, names)
    if faults:
        raise Damaged(faults)
    yield
    check_unchanged(path, before)
