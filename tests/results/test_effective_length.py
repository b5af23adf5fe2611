"""Effective length: the longest text that a model uses better than a window of its training."""

import pytest
from scipy.stats import ttest_1samp

from megatron.results.effective_length import effective_lengths, tables_of_effective_lengths
from megatron.results.files import read_rows
from megatron.results.labels import kinds
from tests.results.rows import rows
from tests.support import ROOT

CONTEXT = [ROOT / f"docs/results/context/{seed}.jsonl" for seed in (1235, 1236, 1237)]


def of(losses, window_losses, **facts):
    """Rows of `tail` for each seed, at 128, 256 and 512, and with a window of 128 at 512."""
    measured = []
    for seed, perplexities, limited in zip((1, 2, 3), losses, window_losses, strict=False):
        shared = {"seed": seed, "train_length": 128, "protocol": "tail", "tail": 64, **facts}
        measured += rows("rotary", dict(zip((128, 256, 512), perplexities, strict=True)), **shared)
        measured += rows("rotary", {512: limited}, window=128, **shared)
    return measured


@pytest.mark.parametrize(
    ("perplexities", "length", "text"),
    [
        ((20, 10.0, 10.0), 512, "512 or more"),
        ((20, 10.0, 20.0), 256, "256"),
        ((20, 20.0, 10.0), 512, "512 or more"),
        ((9, 20.0, 20.0), None, "none shown above 128"),  # shorter than the window, so not asked
    ],
)
def test_it_is_the_longest_length_below_the_window(perplexities, length, text):
    noise = (1.0, 1.01, 0.99)
    losses = [[value * factor for value in perplexities] for factor in noise]
    ((label, effective),) = effective_lengths(of(losses, (15, 15, 15))).items()
    assert (label, effective.length, effective.text) == ("rotary", length, text)


def test_an_interval_with_zero_is_no_gain():
    losses = [[20, 10, 10], [20, 10, 20], [20, 10, 10]]
    (effective,) = effective_lengths(of(losses, (15, 15, 15))).values()
    assert effective.length == 256


def test_without_a_window_it_is_undefined():
    assert effective_lengths(rows("rotary", {512: 9.0}, protocol="tail")) == {}
    assert tables_of_effective_lengths(rows("rotary", {512: 9.0}, protocol="tail")) == []
    assert effective_lengths(rows("rotary", {512: 9.0})) == {}


def test_a_label_tells_it_from_rows_without_a_window():
    """As the labels of tables and figures of the same rows do."""
    losses = [[20, 10, 10]] * 3
    with_window = of(losses, (15, 15, 15), step=200)
    without = [row for row in of(losses, (15, 15, 15), step=100) if not row.get("window")]
    (label,) = effective_lengths(with_window + without)
    assert label == next(label for label in kinds(with_window + without) if "200" in label)


def test_each_text_and_protocol_has_a_table_of_its_own():
    losses = [[20, 10, 20], [20, 10.1, 20], [20, 9.9, 20]]
    windows = (15, 15, 15)
    texts = of(losses, windows) + of(losses, windows, corpus="github")
    texts += of(losses, windows, tail=32)
    tables = tables_of_effective_lengths(texts)
    assert [(table.title, table.body[0][:2]) for table in tables] == [
        ("effective length, stdlib valid: tail, tail 64", ["rotary", "256"]),
        ("effective length, github valid: tail", ["rotary", "256"]),
        ("effective length, stdlib valid: tail, tail 32", ["rotary", "256"]),
    ]


def test_the_committed_rows_agree_with_scipy():
    measured = [row for row in read_rows(CONTEXT) if row["protocol"] == "tail"]
    lengths = effective_lengths(measured)
    assert "rnope_swa" not in " ".join(lengths)  # whose layers have windows of their own
    for name in ("kerple_log", "alibi", "t5", "mep_free", "kerple_power"):
        ours = {
            (row["seed"], row["length"]): row["loss"]
            for row in measured
            if row["pos_emb"] == name and row.get("window") in (None, "none")
        }
        windows = {
            row["seed"]: row["loss"]
            for row in measured
            if row["pos_emb"] == name and row.get("window") in (128, "train_length")
        }
        assert len(windows) == 3
        gains = []
        for length in (512, 1024, 2048, 4096):
            test = ttest_1samp([ours[seed, length] - windows[seed] for seed in windows], 0)
            if test.confidence_interval().high < 0:
                gains.append(length)
        assert lengths[name].length == max(gains, default=None)
