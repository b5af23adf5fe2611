"""Damage to every file of a checkpoint, one at a time, and whether its use notices."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoints.manifest import RECORD
from megatron.checkpoints.read import READ_BY_EVALUATION, load_for_evaluation
from megatron.config import Config, load
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.positions import FILES, REGISTRY
from megatron.training.run import train
from tests.training.conftest import tiny

OWN = """
from megatron.positions import DistanceBias, register

@register("slanted")
class Slanted(DistanceBias):
    def log_kernel(self, distance):
        return (-distance.float() / 4).expand(self.shape.heads, -1)
"""
KINDS = {
    "fp32": ["pos_emb=slanted", "pos_emb_file={here}/slanted.py"],
    "bf16": ["precision=bf16"],
    "zero1": ["zero_optimization.stage=1"],
    "zero2": ["zero_optimization.stage=2"],
    "zero3": ["zero_optimization.stage=3"],
}
SMALL = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=16"]
READS = {"evaluation": {RECORD, *READ_BY_EVALUATION}}

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


@contextmanager
def own_encoding(here: Path) -> Iterator[None]:
    """The file of an encoding of the user's own in a folder; forgotten after the block."""
    (here / "slanted.py").write_text(OWN)
    try:
        yield
    finally:
        REGISTRY.pop("slanted", None)
        FILES.clear()


def words(corpus: Path, here: Path, kind: str, *more: str) -> list[str]:
    """Settings of a run in {here}/run with checkpoints of steps 1 and 2."""
    own = [word.format(here=here) for word in KINDS[kind]]
    paths = [f"data_path={corpus}", f"save={here}/run", f"load={here}/run"]
    return tiny(*SMALL, *paths, "train_iters=2", "save_interval=1", *own, *more)


def settings(corpus: Path, here: Path, kind: str, *more: str) -> Config:
    """The configuration of `words`."""
    return load([], words(corpus, here, kind, *more))


def found_by_use(corpus: Path, here: Path, kind: str, grid: Grid, *more: str) -> list[Outcome]:
    """Damage the checkpoint of step 2 of a run in every way, resume it and evaluate it.

    more: settings of the resumed run
    """
    run = here / "run"
    config = settings(corpus, here, kind, "train_iters=3", "lr_decay_iters=3", *more)
    uses = {
        "resume": lambda: train(config, grid),
        "evaluation": lambda: load_for_evaluation(run),
    }
    load_for_evaluation(run)  # undamaged it can be used
    return outcomes(run / "global_step2", run / "global_step1", uses, READS)


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
