"""Blocks of 512 targets: the same targets at every length, none across a gap in the text."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron.data.tokens import TokenFile, TokenWriter
from megatron.evaluation.blocks import blocks_of
from megatron.evaluation.perplexity import measure, measured
from megatron.evaluation.protocols import PROTOCOLS, Request, Windows
from megatron.results.table import by_length

SIZES = [1500, 40, 2600, 5000, 900]
LENGTHS = [64, 512, 1024, 2048]
REGION = 8192


class Known(nn.Module):
    """The loss of a target is its token / 1000, whatever stands before it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, ids, labels):
        return (labels / 1000).double()


class LaterIsEasier(Known):
    """The loss of a target also falls with its position in the window."""

    def forward(self, ids, labels):
        return (labels / 1000 + 1 / (1 + torch.arange(ids.shape[1]))).double()


@pytest.fixture
def tokens(tmp_path):
    """Five documents in the valid part; the tokens count upwards through the whole file."""
    with TokenWriter(tmp_path / "corpus", np.uint16) as writer:
        start = 0
        for size in SIZES:
            writer.add(np.arange(start, start + size))
            start += size
    return TokenFile.open(tmp_path / "corpus")


def windows_of(protocol, tokens, lengths=LENGTHS, **more):
    options = {"eval_tokens": REGION, "tail": 64, "windows": 5} | more
    return PROTOCOLS[protocol](Request(tokens, lengths, "0,1,0", **options))


@pytest.mark.parametrize("protocol", ["equal_tokens", "position", "sliding"])
def test_block_i_holds_the_same_512_targets_at_every_length(tokens, protocol):
    text = np.arange(1, REGION + 1)  # each target is its own place in the text
    expected = text.reshape(-1, 512).mean(axis=1) / 1000
    for result in measure(Known(), windows_of(protocol, tokens)):
        np.testing.assert_allclose(result.block_losses, expected, atol=1e-6)
        assert result.block_tokens is None, "each has 512 targets"


def test_a_length_that_is_no_power_of_two_has_the_same_blocks_as_far_as_it_goes(tokens):
    whole, rest = measure(Known(), windows_of("equal_tokens", tokens, [512, 768]))
    assert rest.tokens == whole.tokens == 7680  # ten windows of 768: 15 blocks
    assert rest.block_losses == whole.block_losses
    (result,) = measure(Known(), windows_of("equal_tokens", tokens, [100], eval_tokens=1300))
    assert result.block_tokens == [512, 512, 1300 - 1024]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("lengths", [LENGTHS, [96, 320, 700]])
def test_blocks_average_to_the_loss_and_those_of_a_window_to_its_loss(tokens, protocol, lengths):
    for windows in windows_of(protocol, tokens, lengths):
        result = measured(LaterIsEasier(), windows)
        counts = result.block_tokens or [512] * len(result.block_losses)
        assert sum(counts) == result.tokens
        assert np.average(result.block_losses, weights=counts) == pytest.approx(
            result.loss, abs=1e-6
        )
        if windows.length % 512 == 0 and protocol not in ("tail", "sliding"):
            own = np.reshape(result.block_losses, (result.windows, -1)).mean(axis=1)
            np.testing.assert_allclose(own, result.window_losses, atol=2e-6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_targets_of_a_block_follow_each_other_in_the_text(tokens, protocol):
    for windows in windows_of(protocol, tokens, [96, 320, 700], stride=90):
        blocks = blocks_of(windows)
        targets = [[] for _ in blocks.tokens]
        for ids, starts, numbers in zip(windows.ids, blocks.starts, blocks.numbers, strict=True):
            for part, number in zip(np.split(ids[1:], starts)[1:], numbers, strict=True):
                targets[number] += part.tolist()
        assert [len(block) for block in targets] == blocks.tokens
        for block in targets:
            assert block == list(range(block[0], block[0] + len(block)))
            assert len(block) <= 512


def test_a_gap_in_the_text_ends_a_block(tokens):
    (tail,) = windows_of("tail", tokens, [512])
    assert blocks_of(tail).tokens == [64] * len(tail.ids)
    (paper,) = windows_of("paper", tokens, [768])
    assert blocks_of(paper).tokens == [512, 256] * 5
    (within,) = windows_of("within_document", tokens, [768])
    # Documents of 1500, 2600 and 5000 tokens give 1, 3 and 6 windows; eval_tokens allow no more.
    first, second, third = [512, 256], [512] * 4 + [256], [512] * 9
    assert blocks_of(within).tokens == [*first, *second, *third]


def test_one_window_is_cut_at_every_512th_scored_target():
    windows = Windows(1500, [np.arange(1501)], [100])
    blocks = blocks_of(windows)
    assert blocks.starts == [[100, 612, 1124]]
    assert blocks.tokens == [512, 512, 376]


def test_the_prefix_curve_of_a_pass_by_position_has_no_blocks_of_shorter_windows(tokens):
    (result,) = measure(LaterIsEasier(), windows_of("position", tokens))
    *prefixes, whole = by_length([result.row()], LENGTHS)
    assert whole["block_losses"] == result.block_losses
    assert all("block_losses" not in row for row in prefixes)
