"""Killed and started again: nothing is measured twice or mixed up, and no number changes."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megatron.evaluation import resume
from megatron.evaluation.perplexity import WindowSums, measured
from megatron.evaluation.protocols import Windows
from megatron.evaluation.resume import WindowFile, answered, code_fingerprint
from megatron.parallel.grid import Grid

QUESTION = {"pos_emb": "t5", "pos_emb_args": {"kernels": ["exp"]}, "length": 8, "text": "ab"}
IDS = [np.arange(start, start + 9) for start in range(0, 80, 8)]
WINDOWS = Windows(8, IDS, [2] * 10, stretches=[0] * 4 + [1] * 6)
ONE = WindowSums([1.0], [0.25, 0.75])


class Killed(Exception):
    pass


class Mortal(nn.Module):
    """The loss of a target is a third of its token. Ends after some passes, counts its windows."""

    def __init__(self, passes):
        super().__init__()
        self.weight, self.passes, self.asked = nn.Parameter(torch.zeros(1)), passes, 0

    def forward(self, ids, labels):
        if not self.passes:
            raise Killed
        self.passes -= 1
        self.asked += len(ids)
        return labels / 3


def test_a_killed_measurement_goes_on_where_it_was_and_ends_with_the_same_numbers(tmp_path):
    plain = measured(Mortal(100), WINDOWS, batch_tokens=16)
    journal, asked = WindowFile(tmp_path / "a.jsonl", QUESTION), 0
    for passes in (1, 0, 2, 1):
        model = Mortal(passes)
        with pytest.raises(Killed):
            measured(model, WINDOWS, batch_tokens=16, journal=journal)
        asked += model.asked
    with journal.path.open("a") as file:
        file.write("[9, [0.3")  # the kill came while a line was written
    last = Mortal(100)
    found = measured(last, WINDOWS, batch_tokens=16, journal=journal)
    assert asked + last.asked == 10
    assert (asked, found.loss, found.window_losses) == (8, plain.loss, plain.window_losses)
    assert (found.block_losses, found.block_tokens) == (plain.block_losses, [24, 36])
    assert found.tokens_per_second == pytest.approx(2 * 6 / found.seconds), (
        "only what this call measured"
    )
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_windows_of_two_killed_processes_are_finished_by_one(tmp_path, monkeypatch):
    plain = measured(Mortal(100), WINDOWS, batch_tokens=16)
    output = tmp_path / "a.jsonl"
    monkeypatch.setattr(Grid, "gather", lambda self, value: [value])
    for rank in (0, 1):
        journal, grid = WindowFile(output, QUESTION, rank), Grid(rank, ranks=2)
        with pytest.raises(Killed):
            measured(Mortal(1), WINDOWS, batch_tokens=16, grid=grid, journal=journal)
    last = Mortal(100)
    found = measured(last, WINDOWS, batch_tokens=16, journal=WindowFile(output, QUESTION))
    assert last.asked == 10 - 2 - 2
    assert (found.loss, found.block_losses) == (plain.loss, plain.block_losses)


def test_a_damaged_line_of_a_journal_is_measured_again(tmp_path):
    journal = WindowFile(tmp_path / "a.jsonl", QUESTION)
    journal.add({0: ONE, 1: ONE})
    whole = journal.path.read_bytes()
    for place in range(whole.index(b"\n")):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        journal.path.write_bytes(flipped)
        assert journal.read() == {1: ONE}


def test_windows_of_another_question_are_not_used(tmp_path):
    WindowFile(tmp_path / "a.jsonl", QUESTION).add({0: ONE})
    assert WindowFile(tmp_path / "a.jsonl", QUESTION, rank=1).read() == {0: ONE}
    assert WindowFile(tmp_path / "a.jsonl", QUESTION | {"text": "ac"}).read() == {}
    assert WindowFile(tmp_path / "b.jsonl", QUESTION).read() == {}


def test_a_row_answers_only_the_question_that_it_was_measured_for():
    row = QUESTION | {"loss": 1.0}
    assert answered(QUESTION, [row | {"length": 16}, row]) == row
    assert answered(QUESTION | {"code": "other"}, [row]) is None
    assert answered(QUESTION | {"pos_emb_args": {}}, [row]) is None


def test_a_question_without_a_window_is_not_answered_by_a_row_with_one():
    question = QUESTION | {"train_length": 512}
    windowed = question | {"window": 512}
    assert answered(question, [windowed]) is None
    assert answered(question, [windowed, question]) == question
    assert answered(question | {"window": "train_length"}, [windowed]) == windowed


# What a measurement imports and a loss does not depend on.
SHAPES_NO_LOSS = {
    "address.py",
    "commit.py",
    "errors.py",
    "files.py",
    "owner.py",
    "strict_json.py",
    "checkpoints/manifest.py",
    "checkpoints/saved.py",
    "data/blending.py",
    "data/ends.py",  # refuses, or changes nothing
    "data/inspect/pick.py",
    "data/sidecar.py",
    "evaluation/agreement.py",
    "evaluation/bounds.py",
    "evaluation/progress.py",
    "evaluation/resume.py",
    "evaluation/text_bytes.py",  # bits per byte, which kept rows get anew
    "parallel/owned.py",
    "parallel/threads.py",  # last digits only
    "results/check.py",
    "results/files.py",
    "results/row.py",
    "parallel/machine.py",
    "parallel/loopback.py",
}
PACKAGE = Path(resume.__file__).parents[1]


def imported_files(first):
    """All files of the package that one of them imports, directly or not."""
    files, waiting = set(), [first]
    while waiting:
        name = waiting.pop()
        path = PACKAGE.parent / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path in files or not path.exists():
            continue
        files.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                waiting += [f"{node.module}.{alias.name}" for alias in node.names]
                waiting.append(node.module)
    return {str(path.relative_to(PACKAGE)) for path in files if path.is_relative_to(PACKAGE)}


def test_only_code_that_shapes_a_loss_changes_the_fingerprint(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE, tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    before = code_fingerprint()
    monkeypatch.setattr(resume, "PACKAGE", tmp_path / "megatron")
    assert code_fingerprint() == before
    for name in ("report/html/page.py", "results/table.py"):
        with (tmp_path / "megatron" / name).open("a") as file:
            file.write("changed = True\n")
        assert code_fingerprint() == before, name
    for name in ("attention/eager.py", "positions/alibi.py", "evaluation/protocols.py"):
        with (tmp_path / "megatron" / name).open("a") as file:
            file.write("changed = True\n")
        assert code_fingerprint() != before, name
        before = code_fingerprint()
