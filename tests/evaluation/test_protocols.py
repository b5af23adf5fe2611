"""Every protocol on a model whose loss is known for each token and position: sums by hand."""

import hashlib
import json
import math
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megatron.data.samples import build_split, split_documents
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.perplexity import measured
from megatron.protocols import OPTIONS, PROTOCOLS, HeldOutText, Request, protocol_of
from megatron.results.row import SETTING
from megatron.results.table import by_length

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "data"
RUNS = json.loads((GOLDEN / "expected.json").read_text())["runs"]
VALID = [run for run in RUNS if run["split"] == "valid"]
SIZES = [30, 200, 7, 64, 65, 300, 40, 129, 1, 90]
LENGTHS = [16, 32, 64]
SMALL = {"tail": 8}
OF_TEXT = [name for name in PROTOCOLS if name != "task"]  # which has test_task.py
every_protocol = pytest.mark.parametrize("protocol", OF_TEXT)


class LossByPosition(nn.Module):
    """The loss of a target is its token / 1000 + 1 / (1 + its position in the window)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, ids, labels, counted):
        return (labels / 1000 + 1 / (1 + torch.arange(ids.shape[1]))).float()


def token_file(path, sizes):
    """Documents of these sizes; the tokens count upwards through the whole file."""
    with TokenWriter(path, np.uint16) as writer:
        start = 0
        for size in sizes:
            writer.add(np.arange(start, start + size))
            start += size
    return TokenFile(path)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("short") / "corpus", SIZES)


@pytest.fixture(scope="module")
def long_tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("long") / "corpus", [1500, 40, 2600, 5000, 900])


def held_out(tokens, lengths, split="0,1,0", part="valid", eval_tokens=512, seed=1234):
    samples = partial(build_split, tokens, split, part, seed=seed)
    documents = split_documents(tokens, split, part)
    return HeldOutText(
        lengths, eval_tokens, part, split, tokens=tokens, documents=documents, samples=samples
    )


def windows_of(name, text, **options):
    protocol = protocol_of(name, SMALL | options)
    protocol.check(text)
    return [protocol.windows_at(text, length) for length in protocol.lengths(text)]


def by_hand(targets, contexts):
    """The mean of token / 1000 + 1 / (1 + position); a token is its index in the text."""
    return np.mean(np.array(targets) / 1000 + 1 / (1 + np.array(contexts)))


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
        first = [(target, target - 1) for target in range(1, length + 1)]
        return first + [(target, half + (target - 1) % half) for target in region[length:]]
    starts = np.cumsum([0, *SIZES])
    pieces = [(start, (size - 1) // 64 * 64) for start, size in zip(starts, SIZES, strict=False)]
    targets = [
        (start + 1 + offset, offset % length) for start, count in pieces for offset in range(count)
    ]
    return targets[:512]


@pytest.mark.parametrize("protocol", [name for name in OF_TEXT if name != "paper"])
def test_a_protocol_gives_the_value_computed_by_hand_at_every_length(tokens, protocol):
    several = windows_of(protocol, held_out(tokens, LENGTHS))
    for windows in several:
        result = measured(LossByPosition(), windows, batch_tokens=100)
        targets, contexts = zip(*scored(protocol, windows.length), strict=True)
        assert result["tokens"] == len(targets)
        assert result["loss"] == pytest.approx(by_hand(targets, contexts), abs=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        assert len(result["window_losses"]) == result["windows"] == len(windows.ids)
        weights = result.get("window_tokens") or np.ones(result["windows"])
        mean = np.average(result["window_losses"], weights=weights)
        assert mean == pytest.approx(result["loss"], abs=1e-6)
        tokens_and_places = np.array([targets, targets], dtype="<i8")  # a token is its place
        region = hashlib.sha256(tokens_and_places.tobytes()).hexdigest()[:16]
        assert result["region"] == windows.region == region
    assert len({windows.text for windows in several}) == 1, "every length scores the same targets"
    lengths = [windows.length for windows in several]
    assert lengths == ([64] if protocol == "position" else LENGTHS)


def test_a_region_is_that_of_the_targets_and_of_their_places(tokens, tmp_path):
    text = held_out(tokens, [32, 64])
    names = ("equal_tokens", "sliding", "tail", "paper")
    regions = {name: windows_of(name, text)[1].region for name in names}
    assert regions["equal_tokens"] == regions["sliding"]
    assert len(set(regions.values())) == 3
    with TokenWriter(tmp_path / "twice", np.uint16) as writer:
        for _ in range(2):
            writer.add(np.arange(600))
    twice = TokenFile(tmp_path / "twice")
    parts = [held_out(twice, [64], "1,1,0", part) for part in ("train", "valid")]
    (train,), (valid,) = (windows_of("equal_tokens", text) for text in parts)
    assert train.text == valid.text
    assert train.region != valid.region


def test_every_option_of_a_protocol_is_a_key_of_its_rows(tokens):
    for name in OF_TEXT:
        for windows in windows_of(name, held_out(tokens, LENGTHS)):
            facts = protocol_of(name, SMALL).facts | windows.facts
            options = [option.name for option in fields(PROTOCOLS[name])]
            in_rows = [option for option in options if OPTIONS[option].row != "none"]
            assert facts.keys() - {"epochs", "position_edges"} == set(in_rows)
            assert None not in facts.values()
    settings = {name for name, option in OPTIONS.items() if option.row == "setting"}
    assert settings < set(SETTING), "rows are compared only where these are equal"


def test_a_request_is_checked_before_there_is_a_text(tokens):
    for name in PROTOCOLS:
        protocol_of(name, SMALL).check(Request([16, 64], 512))
    for name in ("tail", "sliding", "position", "equal_tokens"):
        with pytest.raises(UserError, match=r"a window of length 64 needs 64 tokens to predict"):
            protocol_of(name, SMALL).check(Request([16, 64], 63))


def test_losses_by_position_are_those_of_the_buckets_and_their_prefix_curve(tokens):
    (windows,) = windows_of("position", held_out(tokens, LENGTHS))
    result = measured(LossByPosition(), windows) | windows.facts
    edges = result["position_edges"]
    assert edges == [0, 1, 2, 4, 8, 16, 32, 64]
    by_position = [by_hand(range(1 + position, 513, 64), [position] * 8) for position in range(64)]
    expected = [np.mean(by_position[edges[i] : edges[i + 1]]) for i in range(7)]
    np.testing.assert_allclose(result["position_losses"], expected, atol=2e-6)
    *prefixes, whole = by_length([result], LENGTHS)
    for row in (*prefixes, whole):
        mean = np.mean(by_position[: row["length"]])
        assert row["perplexity"] == pytest.approx(np.exp(mean), rel=1e-5)
        assert row["tokens"] == 8 * row["length"]
    assert whole["block_losses"] == result["block_losses"]
    assert all(row.get("block_losses") is None for row in prefixes)


@pytest.mark.parametrize("run", VALID, ids=lambda run: run["array"])
def test_the_protocol_of_the_papers_has_the_references_windows_token_for_token(tmp_path, run):
    for suffix in (".bin", ".idx"):
        shutil.copyfile(GOLDEN / f"corpus_text_document{suffix}", tmp_path / f"corpus{suffix}")
    expected = np.load(GOLDEN / "expected_samples.npz")[run["array"]]
    tokens, count = TokenFile(tmp_path / "corpus"), run["num_valid"]
    text = held_out(tokens, [run["valid_seq_length"]], "949,50,1", seed=1235)
    (windows,) = windows_of("paper", text, windows=count)
    assert len(windows.ids) == count
    np.testing.assert_array_equal(np.stack(windows.ids)[: len(expected)], expected[:count])
    assert (windows.counts == windows.length).all()


def test_the_protocol_of_the_papers_starts_where_it_is_told_wraps_and_counts_its_epochs(tokens):
    def ids(seed=1234, **options):
        (windows,) = windows_of("paper", held_out(tokens, [16], seed=seed), windows=20, **options)
        return np.stack(windows.ids)

    np.testing.assert_array_equal(ids()[5:], ids(start=5)[:-5])
    assert (ids() != ids(seed=1236)).any()
    available = int(tokens.sizes.sum()) - 1
    count = available // min(LENGTHS)
    for windows in windows_of("paper", held_out(tokens, LENGTHS), windows=count):
        epochs = -(-count * windows.length // available)
        assert windows.facts == ({"epochs": epochs} if epochs > 1 else {})
    assert epochs == 4, "the longest windows read the part four times"


# --- Blocks of 512 targets: the same targets at every length, none across a gap in the text ---


@every_protocol
def test_the_targets_of_a_block_follow_each_other_and_blocks_average_to_the_loss(
    long_tokens, protocol
):
    options = {"tail": 64, "windows": 5, "stride": 90}
    text = held_out(long_tokens, [96, 320, 700], eval_tokens=8192)
    for windows in windows_of(protocol, text, **options):
        result = measured(LossByPosition(), windows)
        targets = np.concatenate([*windows.targets])
        blocks = np.split(targets, windows.block_starts[1:])
        for block in blocks:
            assert len(block) <= 512
            assert (np.diff(block) == 1).all()
        counts = result.get("block_tokens") or [512] * len(blocks)
        assert counts == [len(block) for block in blocks]
        mean = np.average(result["block_losses"], weights=counts)
        assert mean == pytest.approx(result["loss"], abs=1e-6)


# --- What cannot be measured ---


def test_a_length_without_a_perplexity_says_why_and_a_large_batch_what_helps(tokens):
    class Always(LossByPosition):
        loss = math.nan

        def forward(self, ids, labels, counted):
            if isinstance(self.loss, Exception):
                raise self.loss
            return torch.full(labels.shape, self.loss)

    model = Always().train()
    (windows,) = windows_of("equal_tokens", held_out(tokens, [16]))
    cases = {math.nan: "the loss is nan", 800.0: "exp(800) is too large for a number"}
    for model.loss, reason in cases.items():
        row = measured(model, windows)
        assert (row["perplexity"], row["reason"], row["tokens"]) == (None, reason, 512)
        assert row["loss"] == (800.0 if model.loss == 800.0 else None)
    model.loss = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(UserError, match=r"eval_batch_tokens: 4 x 16 tokens do not fit .* lower it"):
        measured(model, windows, batch_tokens=64)
    assert model.training, "the model is left as it was"
