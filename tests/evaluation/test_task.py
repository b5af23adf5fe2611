"""Protocol task: what is counted, what a row says of its problems, and what a task refuses."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron.data.tasks import TaskText
from megatron.evaluation.loaded_run import loaded_model
from megatron.evaluation.perplexity import measured
from megatron.protocols import HeldOutText, TaskProblems
from megatron.results.files import read_rows
from tests.checkpoints import make_checkpoint
from tests.support import call

RECALL = TaskText("recall", {"pairs": 2})


class Noise(nn.Module):
    """Random logits, but right or wrong where they are asked to be."""

    def __init__(self, windows, wrong):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.logits = torch.randn(len(windows.ids), windows.length, 70)
        self.done = 0
        for number, (ids, places) in enumerate(zip(windows.ids, windows.scored, strict=True)):
            for turn, place in enumerate(places):
                token = 0 if (number, turn) in wrong else ids[place + 1]
                self.logits[number, place, token] = 9.0

    def forward(self, ids, counted):
        self.done += len(ids)
        return self.logits[self.done - len(ids) : self.done][counted]


def test_answers_alone_are_counted_each_and_as_a_whole():
    text = HeldOutText([24], part="test", tokens=RECALL, samples=print)
    windows = TaskProblems(windows=5).windows_at(text, 24)
    model = Noise(windows, wrong={(1, 0), (3, 0), (3, 1)})
    row = measured(model, windows, batch_tokens=48)
    assert row["accuracy"] == 3 / 5
    assert row["token_accuracy"] == 7 / 10
    assert row["window_accuracies"] == [1, 0.5, 1, 0, 1]
    assert (row["windows"], row["tokens"]) == (5, 10)
    losses = -model.logits.double().log_softmax(dim=-1)
    expected = []
    for number, window in enumerate(windows.ids):
        words = [RECALL.words[token] for token in window]
        for place in range(4, 24):  # behind the two pairs
            if words[place].isupper():  # a key, whose value is asked for
                expected.append(losses[number, place, window[place + 1]].item())
    assert row["loss"] == pytest.approx(np.mean(expected), rel=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on flip_flop with large random weights."""
    words = ["seq_length=24", "eval_lengths=[24,48]", "init_method_std=0.5", "split=949,50,1"]
    return make_checkpoint(tmp_path_factory.mktemp("task") / "run", "task:flip_flop", *words)


def rows_of(trained, output, *words):
    done = call("evaluate.py", *words, "--checkpoint", trained, "--output", output)
    assert done.returncode == 0, done.stderr
    return read_rows([output])


def test_a_row_says_which_problems_and_has_the_loss_of_the_plain_formula(trained, tmp_path):
    rows = rows_of(trained, tmp_path / "a.jsonl", "--windows", 6)
    assert [row["length"] for row in rows] == [24, 48]
    model = loaded_model(None, trained, None).model.double()
    for row in rows:
        ids, marks = torch.from_numpy(
            TaskText("flip_flop").windows("valid", row["length"], 6)
        ).unbind(1)
        logits = model(ids[:, :-1])
        losses = -logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        answers = marks[:, 1:].bool()
        right = (logits.argmax(dim=-1) == ids[:, 1:])[answers]
        assert row["loss"] == pytest.approx(losses[answers].mean().item(), rel=1e-5)
        assert row["token_accuracy"] == right.double().mean().item()
        assert (row["windows"], row["tokens"]) == (6, answers.sum())
        assert (row["protocol"], row["corpus"]) == ("task", "task:flip_flop")
        assert not row.keys() & {"task_args", "bits_per_byte"}
    words = ["task_args.ignored=0.1", "--windows", 6]
    *same, first, second = rows_of(trained, tmp_path / "a.jsonl", *words)
    assert same == rows
    assert first["task_args"] == second["task_args"] == {"ignored": 0.1}
    assert not {first["text"], second["text"]} & {row["text"] for row in rows}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "evaluate.py --protocol tail",
            "--protocol: task:flip_flop is a task, which only the protocol task",
        ),
        ("evaluate.py data_path=task:copy", "data_path: task:copy was written by task"),
        ("evaluate.py --lengths 2", "a window of 2 tokens is too short for task:flip_flop, whose"),
        ("evaluate.py --tasks x", "was trained on a task, which has no tokenizer for text"),
        ("generate.py --prompt w", "was trained on a task, which has no tokenizer for text"),
    ],
)
def test_what_needs_a_text_is_refused(trained, command, message):
    script, *words = command.split()
    done = call(script, *words, "--checkpoint", trained)
    assert done.returncode == 1
    assert message in done.stderr
