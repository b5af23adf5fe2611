"""Killed and started again: nothing is measured twice or mixed up, and the numbers are the uninterrupted ones."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron.evaluation.perplexity import WindowSums, measured
from megatron.evaluation.protocols import Windows
from megatron.evaluation.resume import WindowFile, answered

QUESTION = {"pos_emb": "t5", "pos_emb_args": {"kernels": ["exp"]}, "length": 8, "text": "ab"}
IDS = [np.arange(start, start + 9) for start in range(0, 80, 8)]
WINDOWS = Windows(8, IDS, [2] * 10)
ONE = WindowSums([1.0], [0.25, 0.75])


class Killed(Exception):
    pass


class Mortal(nn.Module):
    """The loss of a target is a third of its token; ends after some passes; counts the windows it was asked."""

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
    assert found.block_losses == plain.block_losses
    assert found.tokens_per_second == pytest.approx(2 * 6 / found.seconds), (
        "only what this call measured"
    )
    journal.remove()
    assert list(tmp_path.iterdir()) == []


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
