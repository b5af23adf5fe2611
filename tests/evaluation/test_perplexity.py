"""The loop that measures, on models whose losses are known."""

import io
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron.errors import UserError
from megatron.evaluation import perplexity
from megatron.evaluation.perplexity import measure, measured, progress
from megatron.evaluation.protocols import Windows

VOCAB = 50
TEXT = np.random.default_rng(7).integers(0, VOCAB, 641)


def cut(length, targets=640):
    starts = range(0, targets, length)
    return Windows(
        length, [TEXT[start : start + length + 1] for start in starts], [0] * len(starts)
    )


class Unigram(nn.Module):
    """Knows each token's probability and nothing of the context; keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.linspace(0, 3, VOCAB))
        self.asked = []

    def forward(self, ids, labels):
        self.asked.append(tuple(ids.shape))
        return -self.logits.log_softmax(0)[labels]


class Always(Unigram):
    """The same loss everywhere, or a fault."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, ids, labels):
        if isinstance(self.loss, Exception):
            raise self.loss
        return torch.full(labels.shape, self.loss)


def test_the_loss_is_the_mean_over_every_target_and_batches_change_nothing():
    logits = np.linspace(0, 3, VOCAB, dtype=np.float32).astype(np.float64)
    losses = np.log(np.exp(logits).sum()) - logits
    expected = losses[TEXT[1:]].mean()
    small, large = Unigram(), Unigram().train()
    one_by_one = measure(small, [cut(64), cut(16)], batch_tokens=1)
    together = measure(large, [cut(64), cut(16)], batch_tokens=128)
    assert {*small.asked} == {(1, 16), (1, 64)}
    assert large.asked == [(8, 16)] * 5 + [(2, 64)] * 5
    assert large.training, "the model is left as it was"
    for length, one, row in zip((16, 64), one_by_one, together, strict=True):
        assert (row["length"], row["windows"], row["tokens"]) == (length, 640 // length, 640)
        assert row["loss"] == pytest.approx(expected, abs=1e-6)
        assert row["loss"] == pytest.approx(one["loss"], abs=1e-12)
        assert row["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert row["tokens_per_second"] == pytest.approx(640 / row["seconds"])
        assert row["reason"] is None


def test_progress_counts_windows():
    finished = []
    measured(Unigram(), cut(16, 128), batch_tokens=64, advance=finished.append)
    assert finished == [4, 4]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (UserError("pos_emb: positions end at 32"), "pos_emb: positions end at 32"),
        (math.nan, "the loss is nan"),
        (math.inf, "the loss is inf"),
        (800.0, "exp(800) is too large for a number"),
    ],
)
def test_a_length_without_a_perplexity_says_why(loss, reason):
    (row,) = measure(Always(loss), [cut(16)])
    assert (row["perplexity"], row["reason"], row["tokens"]) == (None, reason, 640)
    assert row["loss"] == (800.0 if loss == 800.0 else None)


def test_too_large_a_batch_names_the_key_that_helps():
    full = Always(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match=r"eval_batch_tokens: 4 x 16 tokens do not fit .* smaller"):
        measure(full, [cut(16)], batch_tokens=64)


def test_a_log_has_a_line_from_time_to_time_and_a_terminal_a_bar(caplog, monkeypatch, capsys):
    caplog.set_level(logging.INFO, logger="megatron")
    monkeypatch.setattr(perplexity, "LINE_EVERY", 0.0)
    for shown in (True, False):
        with progress("tail 512", 4, shown=shown) as bar:
            bar.update(3)
    (line,) = [message for message in caplog.messages if "3 of 4" in message]
    assert line.startswith("tail 512: 3 of 4, about ")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    with progress("tail 512", 4) as bar:
        bar.update(3)
    assert "tail 512" in terminal.getvalue()
    assert len([message for message in caplog.messages if "3 of 4" in message]) == 1
