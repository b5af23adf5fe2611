"""What a killed evaluation had finished: rows that answer the same question, and windows of an unfinished length."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.evaluation.perplexity import Sums, WindowSums
from megatron.results.row import Row, agrees

ROOT = Path(__file__).resolve().parents[1]


def answered(question: Mapping[str, Any], rows: Iterable[Row]) -> Row | None:
    """The row that says the same about model, code and text, or None."""
    wanted = _plain(question)
    return next((row for row in rows if agrees(row, wanted)), None)


def code_fingerprint() -> str:
    """12 hex digits of the package's own text: results of other code are no answer, committed or not."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def file_fingerprint(path: Path) -> str:
    """12 hex digits of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


class WindowFile:
    """Finished windows of one question, a hidden file beside the results for each rank, JSON line by JSON line."""

    def __init__(self, output: Path, question: Mapping[str, Any], rank: int = 0) -> None:
        name = hashlib.sha256(json.dumps(_plain(question), sort_keys=True).encode()).hexdigest()[
            :12
        ]
        self.folder, self.pattern = output.parent, f".{output.name}.{name}.*.partial"
        self.path = output.with_name(self.pattern.replace("*", str(rank)))

    def read(self) -> Sums:
        """What all ranks of an earlier call had noted, as far as it is whole."""
        found: Sums = {}
        for path in sorted(self.folder.glob(self.pattern)):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    index, buckets, parts = json.loads(line)
                except ValueError:  # cut off where the process was killed
                    continue
                found[index] = WindowSums(buckets, parts)
        return found

    def add(self, sums: Sums) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for index, window in sums.items():
                file.write(json.dumps([index, window.buckets, window.parts]) + "\n")

    def remove(self) -> None:
        """The files of all ranks: their length has its row."""
        for path in self.folder.glob(self.pattern):
            path.unlink(missing_ok=True)


def _plain(question: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    return json.loads(json.dumps(question))
