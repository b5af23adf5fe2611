"""The loop that measures, on models whose losses are known."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron.errors import UserError
from megatron.evaluation.perplexity import measured
from megatron.evaluation.protocols import Windows

VOCAB = 50
TEXT = np.random.default_rng(7).integers(0, VOCAB, 641)


def cut(length):
    ids = [TEXT[start : start + length + 1] for start in range(0, 640, length)]
    return Windows(length, ids, [0] * len(ids))


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
    for length in (16, 64):
        model, finished = Unigram().train(), []
        one = measured(Unigram(), cut(length), batch_tokens=1)
        row = measured(model, cut(length), batch_tokens=128, advance=finished.append)
        assert model.asked == [(128 // length, length)] * 5
        assert finished == [128 // length] * 5
        assert model.training, "the model is left as it was"
        assert (row["length"], row["windows"], row["tokens"]) == (length, 640 // length, 640)
        assert row["loss"] == pytest.approx(expected, abs=1e-6)
        assert row["loss"] == pytest.approx(one["loss"], abs=1e-12)
        assert row["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert row["tokens_per_second"] == pytest.approx(640 / row["seconds"])
        assert row["reason"] is None


def test_a_length_without_a_perplexity_says_why_and_a_large_batch_what_helps():
    cases = {math.nan: "the loss is nan", 800.0: "exp(800) is too large for a number"}
    for loss, reason in cases.items():
        row = measured(Always(loss), cut(16))
        assert (row["perplexity"], row["reason"], row["tokens"]) == (None, reason, 640)
        assert row["loss"] == (800.0 if loss == 800.0 else None)
    full = Always(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match=r"eval_batch_tokens: 4 x 16 tokens do not fit .* smaller"):
        measured(full, cut(16), batch_tokens=64)
