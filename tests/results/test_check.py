"""Rows as the program writes them, and as it has published them, are rows."""

from dataclasses import replace

import pytest

from megatron.evaluation.perplexity import Measurement
from megatron.results.check import fault_of
from megatron.results.files import read_results
from megatron.results.probes import is_of_probes, read_probes
from megatron.results.row import Row
from tests.support import ROOT

MODEL = {"pos_emb": "alibi", "step": 4, "config_hash": "ab"}
REFUSED = Measurement(
    length=64,
    windows=2,
    tokens=128,
    loss=None,
    perplexity=None,
    seconds=0.0,
    tokens_per_second=None,
    reason="pos_emb: learned positions end at 16, so length 64 cannot be computed",
)
HUGE = replace(
    REFUSED,
    loss=1000.0,
    reason="exp(1000) is too large for a number",
    window_losses=[1000.0, 1000.0],
    block_losses=[1000.0],
    block_tokens=[128],
)


@pytest.mark.parametrize("measurement", [REFUSED, HUGE], ids=["refused", "huge"])
def test_a_length_without_a_perplexity_is_a_row(measurement):
    assert fault_of(MODEL | measurement.row(), Row) is None


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs/results").glob("*.jsonl")), ids=lambda file: file.stem
)
def test_published_rows_are_accepted_as_they_are(file):
    read = read_probes if is_of_probes(file) else read_results
    assert read([file])
