"""What an interrupted evaluation had finished: rows of lengths, and windows of the next length."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from megatron.errors import UserError
from megatron.evaluation.perplexity import Sums, WindowSums
from megatron.results.row import ATTENTION_INPUTS, Question, Row, agrees, identity

PACKAGE = Path(__file__).resolve().parents[1]

# The code that a loss depends on, whole packages and single files. Figures, pages, tables and
# commands are not among it: their changes need no new measurement.
SHAPES_LOSSES = (
    "attention",
    "config",
    "model",
    "positions",
    "checkpoints/read.py",
    "data/parts.py",
    "data/samples.py",
    "data/token_index.py",
    "data/tokenizers",
    "data/tokens.py",
    "evaluation/blocks.py",
    "evaluation/opened.py",
    "evaluation/perplexity.py",
    "evaluation/protocols.py",
    "evaluation/run.py",
    "parallel/grid.py",
    "results/statistics.py",
    "splits.py",
)


NO_CODE = "0" * 12


def answered(question: Mapping[str, Any], rows: Iterable[Row]) -> Row | None:
    """The first row that has every fact of the question and the same attention inputs, or None.

    A question without a window is not answered by a row with one.
    """
    wanted = _as_read_back(question)
    inputs = identity(cast(Question, wanted), ATTENTION_INPUTS)
    for row in rows:
        if agrees(row, wanted) and identity(row, ATTENTION_INPUTS) == inputs:
            return row
    return None


def code_fingerprint() -> str:
    """12 hex digits of the code that shapes a loss, committed or not.

    A row of other code is measured again.
    """
    digest = hashlib.sha256()
    for path in loss_shaping_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def loss_shaping_files() -> Iterator[Path]:
    """The files of `SHAPES_LOSSES`, always in the same order."""
    for name in SHAPES_LOSSES:
        path = PACKAGE / name
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        else:
            yield path


class WindowFile:
    """Finished windows of one question, on disk until their length is done.

    Each rank writes a hidden file of its own beside the results: a line for each window, with a
    checksum before it. A line that a kill cut off or that was damaged is measured again.
    """

    def __init__(self, output: Path, question: Mapping[str, Any], rank: int = 0) -> None:
        text = json.dumps(_as_read_back(question), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.folder = output.parent
        self.prefix = f".{output.name}.{question.get('code', NO_CODE)}.{name}"
        self.path = self.folder / f"{self.prefix}.{rank}.partial"

    def read(self) -> Sums:
        """The windows that all ranks of an earlier call finished."""
        windows: Sums = {}
        for path in self._files():
            for line in _readable(path).split(b"\n"):
                found = _window_of(line)
                if found is not None:
                    index, window = found
                    windows[index] = window
        return windows

    def add(self, sums: Sums) -> None:
        """Write down more windows of this rank."""
        lines = []
        for index, window in sums.items():
            text = json.dumps([index, window.buckets, window.parts])
            lines.append(f"{_checksum(text.encode())} {text}")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))

    def remove(self) -> None:
        """Delete the files of all ranks: their length has its row."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.prefix}.*.partial"))


def remove_unusable(output: Path) -> None:
    """Remove windows that other code measured for a file: they answer no question any more."""
    form = re.compile(
        rf"\.{re.escape(output.name)}\.([0-9a-f]{{12}})(\.[0-9a-f]{{12}})?\.\d+\.partial"
    )
    code = code_fingerprint()
    for path in output.parent.iterdir():
        match = form.fullmatch(path.name)
        if match and (match[2] is None or match[1] != code):
            path.unlink(missing_ok=True)


def _readable(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise UserError(
            f"{path}: cannot be read ({fault.strerror}) - it holds finished windows: make it"
            " readable, or remove it and they are measured again"
        ) from None


def _window_of(line: bytes) -> tuple[int, WindowSums] | None:
    """(number, sums) of a window, as `add` wrote it; None for a damaged line."""
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text).encode():
        return None
    index, buckets, parts = json.loads(text)
    return index, WindowSums(buckets, parts)


def _checksum(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"


def _as_read_back(question: Mapping[str, Any]) -> dict[str, Any]:
    """The question as JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(question))
