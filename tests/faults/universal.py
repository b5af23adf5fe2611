"""Every pair of engines: a checkpoint saved by one is continued by the other.

Run it by itself: python -m tests.faults.universal CORPUS FOLDER
"""

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT, run
from tests.training.conftest import records, tiny

AT_ONCE = 10  # runs of one process that has imported everything
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


def every_pair() -> list[Pair]:
    """Every kind with every kind of its precision."""
    pairs = itertools.product(KINDS, KINDS)
    return [(writer, reader) for writer, reader in pairs if writer.precision == reader.precision]


def ring() -> list[Pair]:
    """Every kind with the next of its precision: each writes once and continues once."""
    pairs = []
    for precision in ("fp32", "bf16"):
        kinds = [kind for kind in KINDS if kind.precision == precision]
        pairs += zip(kinds, [*kinds[1:], kinds[0]], strict=True)
    return pairs


def differences(corpus: Path, folder: Path, pairs: list[Pair]) -> dict[Pair, tuple[float, float]]:
    """(writer, reader) -> the largest difference of their four losses, and the one allowed.

    Every run takes eight windows a step, and no dropout. AssertionError where a run fails.
    """
    writers = dict.fromkeys(writer for writer, _ in pairs)
    _train([_words(corpus, folder / str(kind), kind) for kind in writers])
    _train(
        [
            _words(corpus, _place(folder, *pair), pair[1], f"load={folder}/{pair[0]}/global_step4")
            for pair in pairs
        ]
    )
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


def _words(corpus: Path, save: Path, kind: Kind, *more: str) -> str:
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
    return json.dumps([kind.ranks, tiny(*settings, *more)])


def _train(runs: list[str]) -> None:
    for start in range(0, len(runs), AT_ONCE):
        part = runs[start : start + AT_ONCE]
        done = run(ROOT / "tests/training/forked.py", *part, timeout=600)
        assert done.returncode == 0, done.stderr


def main() -> int:
    """Print the table; 1 where a difference is larger than allowed."""
    found = differences(Path(sys.argv[1]), Path(sys.argv[2]), every_pair())
    wrong = 0
    for (writer, reader), (gap, allowed) in found.items():
        print(f"{writer!s:22} {reader!s:22} {gap:.1e}  allowed {allowed:.0e}")
        wrong += gap > allowed
    print(f"{len(found)} pairs, {wrong} with a larger difference than allowed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
