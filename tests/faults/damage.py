"""Damage to every file of a checkpoint, one at a time, and whether its use notices."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import UserError

Use = Callable[[], object]  # a resume or an evaluation, which raises UserError where it refuses


@dataclass(frozen=True)
class Outcome:
    """What one use of a checkpoint with one damaged file said; message: None if it noticed nothing.

    named: whether the message names the file
    """

    use: str
    file: str
    damage: str
    message: str | None
    named: bool


def truncated(content: bytes, other: bytes | None) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes, other: bytes | None) -> bytes:
    """One bit of one byte; the same one for the same file."""
    draw = random.Random(len(content))
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def emptied(content: bytes, other: bytes | None) -> bytes:
    return b""


def deleted(content: bytes, other: bytes | None) -> None:
    return None


def replaced(content: bytes, other: bytes | None) -> bytes | None:
    """The file of another step; unchanged where both are equal."""
    return content if other is None else other


DAMAGES: dict[str, Callable[[bytes, bytes | None], bytes | None]] = {
    "truncated": truncated,
    "flipped": flipped,
    "emptied": emptied,
    "deleted": deleted,
    "replaced": replaced,
}


@contextmanager
def changed(file: Path, content: bytes | None) -> Iterator[None]:
    """Another content of a file inside the block, None for no file; afterwards the old one."""
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(before)


def outcomes(
    path: Path, other: Path, uses: Mapping[str, Use], reads: Mapping[str, set[str]]
) -> list[Outcome]:
    """Damage each file of the folder `path` in each way, and try each use of it.

    other: the folder of another step of the same run
    reads: the files that a use reads; every file for a use without an entry
    """
    found = []
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        counterpart = other / file.name
        of_other = counterpart.read_bytes() if counterpart.exists() else None
        for damage, damaged in DAMAGES.items():
            after = damaged(content, of_other)
            if after == content:
                continue
            with changed(file, after):
                for use, act in uses.items():
                    if file.name in reads.get(use, {file.name}):
                        found.append(_outcome(use, file, damage, act))
    return found


def _outcome(use: str, file: Path, damage: str, act: Use) -> Outcome:
    try:
        act()
    except UserError as fault:
        named = f"{file.parent.name}/{file.name}" in str(fault)
        return Outcome(use, file.name, damage, str(fault), named)
    return Outcome(use, file.name, damage, None, False)
