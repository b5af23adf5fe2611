"""Pairs of engines: a checkpoint saved by one is continued by the other."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Forks
from tests.training.conftest import records, tiny

EXACT, ROUNDED = 1e-5, 1e-3
"""Allowed differences of losses. DeepSpeed sums gradients in bfloat16 at stages 2 and 3."""


@dataclass(frozen=True)
class Kind:
    ranks: int
    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{self.precision}-zero{self.stage}-ranks{self.ranks}"

    @property
    def rounds(self) -> bool:
        return self.precision == "bf16" and self.stage >= 2


KINDS = [
    Kind(ranks, stage, precision)
    for precision, ranks, stage in itertools.product(("fp32", "bf16"), (1, 2), range(4))
    if (precision, stage) != ("bf16", 0)  # runs as stage 1
]


Pair = tuple[Kind, Kind]  # who writes a checkpoint, who continues it


def ring() -> list[Pair]:
    """Every kind with the next of its precision: each writes once and continues once."""
    pairs = []
    for precision in ("fp32", "bf16"):
        kinds = [kind for kind in KINDS if kind.precision == precision]
        pairs += zip(kinds, [*kinds[1:], kinds[0]], strict=True)
    return pairs


def differences(
    forks: Forks, corpus: Path, folder: Path, pairs: list[Pair]
) -> dict[Pair, tuple[float, float]]:
    """(writer, reader) -> the largest difference of their four losses, and the one allowed.

    Every run takes eight windows a step, and no dropout. AssertionError where a run fails.
    """
    writers = dict.fromkeys(writer for writer, _ in pairs)
    for kind in writers:
        words = _words(corpus, folder / str(kind), kind)
        _train(forks, kind.ranks, words, folder / f"{kind}.log")
    for writer, reader in pairs:
        place = _place(folder, writer, reader)
        words = _words(corpus, place, reader, f"load={folder}/{writer}/global_step4")
        _train(forks, reader.ranks, words, place.with_suffix(".log"))
    found = {}
    for writer, reader in pairs:
        before, after = records(folder / str(writer)), records(_place(folder, writer, reader))
        assert after.keys() == {5, 6, 7, 8}
        gaps = [abs(before[step]["loss"] - after[step]["loss"]) for step in after]
        allowed = ROUNDED if writer.rounds or reader.rounds else EXACT
        found[writer, reader] = (max(gaps), 0.0 if writer == reader else allowed)
    return found


def _place(folder: Path, writer: Kind, reader: Kind) -> Path:
    return folder / f"{writer}-to-{reader}"


def _words(corpus: Path, save: Path, kind: Kind, *more: str) -> list[str]:
    settings = [
        "pos_emb=mep_param",
        "train_iters=8",
        "save_interval=4",
        f"gradient_accumulation_steps={2 // kind.ranks}",
        f"zero_optimization.stage={kind.stage}",
        f"precision={kind.precision}",
        f"data_path={corpus}",
        f"save={save}",
    ]
    return tiny(*settings, *more)


def _train(forks: Forks, ranks: int, words: list[str], log: Path) -> None:
    pids = forks.start_ranks(ranks, "train.py", *words, log=log)
    assert not any([forks.wait(pid) for pid in pids]), log.read_text()
