import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.perplexity import measure
from megatron.evaluation.protocols import Request, equal_tokens, paper

VOCAB = 50
SPLIT = "5,4,1"


@pytest.fixture
def tokens(tmp_path):
    """100 documents of 30 to 89 tokens; the part "valid" is documents 50 to 89."""
    generator = np.random.default_rng(7)
    with TokenWriter(tmp_path / "corpus", np.uint16) as writer:
        for size in generator.integers(30, 90, 100):
            writer.add(generator.integers(0, VOCAB, size))
    return TokenFile.open(tmp_path / "corpus")


class Unigram(nn.Module):
    """Knows each token's probability and nothing of the context; keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.linspace(0, 3, VOCAB))
        self.asked = []

    def forward(self, ids, labels):
        self.asked.append((ids.clone(), labels.clone()))
        return -self.logits.log_softmax(0)[labels]

    @property
    def loss_of(self):
        logits = np.linspace(0, 3, VOCAB, dtype=np.float32).astype(np.float64)
        return np.log(np.exp(logits).sum()) - logits


class LaterIsHarder(Unigram):
    """The loss of a target is its position in the window: 0, 1, 2 …"""

    def forward(self, ids, labels):
        return torch.arange(ids.shape[1], dtype=torch.float32).expand(ids.shape) / 100


class EndsAt(Unigram):
    def __init__(self, end):
        super().__init__()
        self.end = end

    def forward(self, ids, labels):
        if ids.shape[1] > self.end:
            raise UserError(f"pos_emb: positions end at {self.end}")
        return super().forward(ids, labels)


class Always(Unigram):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, ids, labels):
        if isinstance(self.loss, Exception):
            raise self.loss
        return torch.full(labels.shape, self.loss)


def whole_text(tokens, documents):
    return np.concatenate([tokens.read(document) for document in documents]).astype(np.int64)


def test_the_loss_is_the_mean_over_every_target_of_the_text(tokens):
    windows = equal_tokens(Request(tokens, [64, 16], SPLIT, eval_tokens=1000))
    targets = whole_text(tokens, range(50, 90))[
        1 : 960 + 1
    ]  # 960 = 15 · 64, the most that 1000 holds
    expected = Unigram().loss_of[targets].mean()
    for measured in measure(Unigram(), windows):
        assert measured.tokens == 960
        assert measured.windows == 960 // measured.length
        assert measured.loss == pytest.approx(expected, abs=1e-6)
        assert measured.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
        assert measured.tokens_per_second == pytest.approx(960 / measured.seconds)
        assert measured.reason is None


def test_the_position_in_the_window_is_what_the_length_changes(tokens):
    windows = equal_tokens(Request(tokens, [16, 64], SPLIT, eval_tokens=640))
    short, long = measure(LaterIsHarder(), windows)
    assert short.loss == pytest.approx((0 + 15) / 2 / 100)
    assert long.perplexity == pytest.approx(math.exp((0 + 63) / 2 / 100))


def test_every_length_scores_the_same_targets_once(tokens):
    text = whole_text(tokens, range(50, 90))
    found = equal_tokens(Request(tokens, [8, 16, 128], SPLIT, eval_tokens=512))
    for windows in found:
        assert {len(window) for window in windows.ids} == {windows.length + 1}
        np.testing.assert_array_equal(
            np.concatenate([window[1:] for window in windows.ids]), text[1:513]
        )
        np.testing.assert_array_equal(
            np.concatenate([window[:-1] for window in windows.ids]), text[:512]
        )
    assert len({windows.text for windows in found}) == 1


def test_a_length_that_does_not_divide_the_text_leaves_its_rest_out(tokens):
    windows = equal_tokens(Request(tokens, [100, 256], SPLIT, eval_tokens=600))
    assert {found.length: len(found.ids) for found in windows} == {100: 5, 256: 2}


def test_a_small_part_is_used_as_far_as_whole_windows_go(tokens):
    available = len(whole_text(tokens, range(90, 100))) - 1
    (windows,) = equal_tokens(Request(tokens, [100], SPLIT, part="test", eval_tokens=10**9))
    assert len(windows.ids) == available // 100
    np.testing.assert_array_equal(windows.ids[0], whole_text(tokens, range(90, 100))[:101])


def test_batches_are_filled_to_the_token_budget_and_change_nothing(tokens):
    windows = equal_tokens(Request(tokens, [16, 64], SPLIT, eval_tokens=640))
    small, large = Unigram(), Unigram()
    one_by_one = measure(small, windows, batch_tokens=1)
    together = measure(large, windows, batch_tokens=128)
    assert {tuple(ids.shape) for ids, _ in small.asked} == {(1, 16), (1, 64)}
    assert [tuple(ids.shape) for ids, _ in large.asked] == [(8, 16)] * 5 + [(2, 64)] * 5
    assert [row.loss for row in one_by_one] == pytest.approx(
        [row.loss for row in together], abs=1e-12
    )


def test_evaluation_leaves_the_model_as_it_was(tokens):
    model = Unigram().train()
    measure(model, equal_tokens(Request(tokens, [16], SPLIT, eval_tokens=16)))
    assert model.training
    assert model.logits.grad is None


def test_progress_counts_windows_of_each_length(tokens):
    calls = []
    windows = equal_tokens(Request(tokens, [16, 64], SPLIT, eval_tokens=128))
    measure(Unigram(), windows, batch_tokens=64, advance=lambda *news: calls.append(news))
    assert calls == [(16, 0, 8), (16, 4, 8), (16, 8, 8), (64, 0, 2), (64, 1, 2), (64, 2, 2)]


def test_a_length_that_the_model_refuses_says_why_and_the_others_are_measured(tokens):
    windows = equal_tokens(Request(tokens, [16, 32, 64], SPLIT, eval_tokens=64))
    short, fits, beyond = measure(EndsAt(32), windows)
    assert short.perplexity is not None
    assert fits.perplexity is not None
    assert (beyond.loss, beyond.perplexity, beyond.tokens) == (None, None, 64)
    assert beyond.reason == "pos_emb: positions end at 32"


@pytest.mark.parametrize(
    ("loss", "reason"), [(math.nan, "the loss is nan"), (math.inf, "the loss is inf")]
)
def test_a_loss_that_is_no_number_is_no_perplexity(tokens, loss, reason):
    (row,) = measure(Always(loss), equal_tokens(Request(tokens, [16], SPLIT, eval_tokens=16)))
    assert (row.loss, row.perplexity, row.reason) == (None, None, reason)


def test_a_perplexity_beyond_float64_is_left_out_and_the_loss_stays(tokens):
    (row,) = measure(Always(800.0), equal_tokens(Request(tokens, [16], SPLIT, eval_tokens=16)))
    assert (row.loss, row.perplexity, row.reason) == (
        800.0,
        None,
        "exp(800) is too large for a number",
    )


def test_too_large_a_batch_names_the_key_that_helps(tokens):
    full = Always(torch.OutOfMemoryError("CUDA out of memory"))
    windows = equal_tokens(Request(tokens, [16], SPLIT, eval_tokens=64))
    with pytest.raises(
        UserError, match=r"eval_batch_tokens: 4 x 16 tokens do not fit .* - make it smaller"
    ):
        measure(full, windows, batch_tokens=64)
    with pytest.raises(
        UserError, match=r"1 x 16 tokens do not fit .* - leave this length out with --lengths"
    ):
        measure(full, windows, batch_tokens=1)


def test_a_part_without_one_window_says_what_would_help(tokens):
    message = (
        r"eval_part: the test part of the corpus has \d+ tokens to predict, .* needs 4096 -"
        r" use a larger corpus"
    )
    with pytest.raises(UserError, match=message):
        equal_tokens(Request(tokens, [512, 4096], SPLIT, part="test", eval_tokens=10000))


def test_eval_tokens_below_one_window_is_an_error(tokens):
    with pytest.raises(
        UserError, match=r"eval_tokens: 100 is less than one window .* - write eval_tokens=512"
    ):
        equal_tokens(Request(tokens, [16, 512], SPLIT, eval_tokens=100))


def test_lengths_are_checked_sorted_and_counted_once(tokens):
    assert Request(tokens, [64, 16, 64]).checked_lengths == [16, 64]
    with pytest.raises(UserError, match=r"eval_lengths: \[-3, 0\]"):
        equal_tokens(Request(tokens, [16, 0, -3]))
    with pytest.raises(UserError, match="eval_lengths: none given"):
        equal_tokens(Request(tokens, []))


def test_the_protocol_of_the_papers_takes_as_many_windows_at_every_length(tokens):
    windows = paper(Request(tokens, [16, 32], SPLIT, seed=1235, windows=20))
    assert {one.length: {len(window) for window in one.ids} for one in windows} == {
        16: {17},
        32: {33},
    }
    assert [len(one.ids) for one in windows] == [20, 20]


def test_the_protocol_of_the_papers_starts_where_it_is_told_and_wraps(tokens):
    first = np.stack(paper(Request(tokens, [16], SPLIT, seed=1235, windows=20))[0].ids)
    later = np.stack(paper(Request(tokens, [16], SPLIT, seed=1235, windows=20, start=5))[0].ids)
    np.testing.assert_array_equal(first[5:], later[:-5])
    other_seed = np.stack(paper(Request(tokens, [16], SPLIT, seed=1236, windows=20))[0].ids)
    assert (first != other_seed).any()


@pytest.mark.parametrize(("windows", "start"), [(0, 0), (20, -1)])
def test_the_protocol_of_the_papers_wants_windows(tokens, windows, start):
    with pytest.raises(
        UserError, match=rf"--windows {windows} --start {start}: give at least 1 window"
    ):
        paper(Request(tokens, [16], SPLIT, seed=1, windows=windows, start=start))
