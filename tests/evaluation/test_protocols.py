"""Every protocol on a model whose loss is known for each token and position: sums by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.perplexity import measure
from megatron.evaluation.protocols import PROTOCOLS, Request, window_counts
from megatron.results.statistics import prefix_curve
from megatron.results.table import by_length

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
VALID = [
    run
    for run in json.loads((GOLDEN / "expected.json").read_text())["runs"]
    if run["split"] == "valid"
]
SIZES = [30, 200, 7, 64, 65, 300, 40, 129, 1, 90]
LENGTHS = [16, 32, 64]


class Known(nn.Module):
    """The loss of a target is its token / 1000 + 1 / (1 + its position in the window)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, ids, labels):
        return (labels / 1000 + 1 / (1 + torch.arange(ids.shape[1]))).float()


@pytest.fixture
def tokens(tmp_path):
    """Ten documents, all in the valid part; the tokens count upwards through the whole file."""
    first = np.concatenate([[0], np.cumsum(SIZES)])
    with TokenWriter(tmp_path / "corpus", np.uint16) as writer:
        for start, size in zip(first, SIZES, strict=False):
            writer.add(np.arange(start, start + size))
    return TokenFile.open(tmp_path / "corpus")


def request(tokens, **more):
    return Request(tokens, LENGTHS, "0,1,0", **({"eval_tokens": 512, "tail": 8} | more))


def by_hand(targets, contexts):
    """The mean of token / 1000 + 1 / (1 + position); a token is its index in the text."""
    losses = [
        target / 1000 + 1 / (1 + context) for target, context in zip(targets, contexts, strict=True)
    ]
    return sum(losses) / len(losses)


def scored(protocol, length):
    """Targets and their positions in the window, token by token, as the protocol is defined."""
    region = range(1, 513)
    if protocol in ("equal_tokens", "position"):
        return [(target, (target - 1) % length) for target in region]
    if protocol == "tail":
        ends = [64 + 16 * number for number in range(29)]
        return [(end - back, length - 1 - back) for end in ends for back in reversed(range(8))]
    if protocol == "sliding":  # half a window each time: after the first the later half
        half = length // 2
        return [
            (target, target - 1 if target <= length else half + (target - 1) % half)
            for target in region
        ]
    starts = np.cumsum([0, *SIZES])
    pieces = [(start, (size - 1) // 64 * 64) for start, size in zip(starts, SIZES, strict=False)]
    found = [
        (start + 1 + offset, offset % length) for start, count in pieces for offset in range(count)
    ]
    return found[:512]


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "paper"])
def test_a_protocol_gives_the_value_computed_by_hand_at_every_length(tokens, protocol):
    windows = PROTOCOLS[protocol](request(tokens))
    for one, result in zip(windows, measure(Known(), windows, batch_tokens=100), strict=True):
        targets, contexts = zip(*scored(protocol, one.length), strict=True)
        assert result.tokens == len(targets)
        assert result.loss == pytest.approx(by_hand(targets, contexts), abs=1e-6)
        assert len(result.window_losses) == result.windows == len(one.ids)
        weights = result.window_tokens or np.ones(result.windows)
        assert np.average(result.window_losses, weights=weights) == pytest.approx(
            result.loss, abs=1e-6
        )
    assert len({one.text for one in windows}) == 1, "every length scores the same targets"
    assert [one.length for one in windows] == ([64] if protocol == "position" else LENGTHS)


def test_losses_by_position_are_those_of_the_buckets_and_their_prefix_curve(tokens):
    (result,) = measure(Known(), PROTOCOLS["position"](request(tokens)))
    assert result.position_edges == [0, 1, 2, 4, 8, 16, 32, 64]
    by_position = [by_hand(range(1 + position, 513, 64), [position] * 8) for position in range(64)]
    for start, end, loss in zip(
        result.position_edges, result.position_edges[1:], result.position_losses, strict=False
    ):
        assert loss == pytest.approx(np.mean(by_position[start:end]), abs=2e-6)
    curve = prefix_curve(result.position_edges, result.position_losses)
    rows = by_length([result.row() | {"length": 64}], LENGTHS)
    for row in rows:
        expected = np.mean(by_position[: row["length"]])
        assert curve[row["length"]] == pytest.approx(expected, abs=2e-6)
        assert row["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
        assert row["tokens"] == 8 * row["length"]


def test_the_tail_sees_the_text_right_before_it_at_every_length(tokens):
    short, middle, long = PROTOCOLS["tail"](request(tokens))
    for one in (short, middle, long):
        assert set(one.counts) == {8}
        assert one.about == {"tail": 8}
    for end, (a, b, c) in zip(
        range(64, 513, 16), zip(short.ids, middle.ids, long.ids, strict=True), strict=True
    ):
        np.testing.assert_array_equal(c, np.arange(end - 64, end + 1))
        np.testing.assert_array_equal(b, c[-33:])
        np.testing.assert_array_equal(a, c[-17:])


def test_a_stride_of_its_own_is_kept_in_every_row(tokens):
    for one in PROTOCOLS["sliding"](request(tokens, stride=4)):
        assert one.about == {"stride": 4}
        assert len(one.ids) == 1 + (512 - one.length) // 4
        assert [window[0] for window in one.ids[:3]] == [0, 4, 8]
        assert one.counts.tolist() == [one.length] + [4] * (len(one.ids) - 1)


def test_no_window_leaves_its_document(tokens):
    ends = set(np.cumsum(SIZES) - 1)
    for one in PROTOCOLS["within_document"](request(tokens)):
        assert all(not ends & set(window[:-1].tolist()) for window in one.ids)
    few = PROTOCOLS["within_document"](request(tokens, eval_tokens=130))
    assert [one.counts.sum() for one in few] == [128, 128, 128]


@pytest.mark.parametrize("options", [{}, {"tail": 8, "stride": 3, "windows": 7}])
@pytest.mark.parametrize("lengths", [LENGTHS, [10, 33, 63], [64]])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_windows_are_counted_as_they_are_cut(tokens, protocol, lengths, options):
    asked = Request(tokens, lengths, "0,1,0", eval_tokens=500, **({"tail": 10} | options))
    cut = {windows.length: len(windows.ids) for windows in PROTOCOLS[protocol](asked)}
    counted = window_counts(protocol, lengths, 500, **({"tail": 10} | options))
    if protocol == "within_document":  # short documents are left out
        assert all(cut[length] <= counted[length] for length in lengths)
    else:
        assert counted == cut


@pytest.mark.parametrize("run", VALID, ids=lambda run: run["array"])
def test_the_protocol_of_the_papers_has_the_references_windows_token_for_token(tmp_path, run):
    for suffix in (".bin", ".idx"):
        shutil.copyfile(GOLDEN / f"corpus_text_document{suffix}", tmp_path / f"corpus{suffix}")
    expected = np.load(GOLDEN / "expected_samples.npz")[run["array"]]
    asked = Request(
        TokenFile.open(tmp_path / "corpus"),
        [run["valid_seq_length"]],
        "949,50,1",
        seed=1235,
        windows=run["num_valid"],
    )
    (one,) = PROTOCOLS["paper"](asked)
    assert len(one.ids) == run["num_valid"]
    np.testing.assert_array_equal(np.stack(one.ids)[: len(expected)], expected[: run["num_valid"]])
    assert set(one.first_scored) == {0}


def test_the_protocol_of_the_papers_says_how_often_it_reads_a_short_part(tokens):
    available = int(tokens.sizes.sum()) - 1
    windows = available // min(LENGTHS)
    for one in PROTOCOLS["paper"](request(tokens, windows=windows)):
        epochs = -(-windows * one.length // available)
        assert one.about == ({"start": 0, "epochs": epochs} if epochs > 1 else {"start": 0})
    assert epochs == 4, "the longest windows read the part four times"


@pytest.mark.parametrize(
    ("protocol", "options", "message"),
    [
        (
            "tail",
            {"tail": 17},
            "--tail 17: must be 1 to 16, the shortest length"
            " - give another number, or longer lengths",
        ),
        (
            "sliding",
            {"stride": 17},
            "--stride 17: must be 1 to 16, the length of a window"
            " - give another number, or longer lengths",
        ),
        (
            "sliding",
            {"stride": 0},
            "--stride 0: must be 1 to 16, the length of a window"
            " - give another number, or longer lengths",
        ),
        (
            "within_document",
            {"lengths": (512,)},
            "within_document: no document of the valid part has 513 tokens, the longest has 300,"
            " and eval_tokens is 512 - give lengths up to 299 and as many tokens",
        ),
    ],
)
def test_what_a_protocol_cannot_measure_is_one_message(tokens, protocol, options, message):
    asked = {"lengths": LENGTHS, "eval_tokens": 512, **options}
    with pytest.raises(UserError) as caught:
        PROTOCOLS[protocol](Request(tokens, split="0,1,0", **asked))
    assert str(caught.value) == message
