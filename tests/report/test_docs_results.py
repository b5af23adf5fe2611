"""The page of docs/results: every label says what differs, and references are found."""

import pytest

from megatron.errors import UserError
from megatron.report.page import page_of_rows, reference_of
from megatron.results.comparison import compared, encodings
from megatron.results.files import read_results
from megatron.results.labels import kinds
from tests.support import ROOT

ENCODINGS = [
    "sinusoidal",
    "rotary",
    "t5",
    "alibi",
    "kerple_log",
    "kerple_power",
    "mep_free",
    "mep_param",
]
FILES = sorted((ROOT / "docs" / "results").glob("cpu-*.jsonl"))


@pytest.fixture(scope="module")
def rows():
    return read_results(FILES)


def test_labels_have_what_differs_and_no_more(rows):
    windowed = {f"{name}, window {n}" for name in ENCODINGS for n in ("none", "512")}
    assert {*kinds(rows)} == windowed
    for section in page_of_rows(rows, [], {}).sections:
        labels = {line[0] for line in section.table.body}
        assert labels == (windowed if section.protocol == "equal_tokens" else {*ENCODINGS})


def test_against_means_the_same_in_compare_and_on_the_page(rows):
    tail = kinds([row for row in rows if row["protocol"] == "tail"])
    for against, label, in_section in (
        ("mep_free, window none", "mep_free, window none", "mep_free"),
        ("alibi, protocol tail", "alibi, window none", "alibi"),
        # The protocol `tail` has no windows: the page takes the lowest there.
        ("t5, window train_length", "t5, window 512", None),
    ):
        assert compared(encodings(rows), against)[0].reference == label
        assert reference_of(tail, against) == (in_section or reference_of(tail, None))
    for against, problem in {"alibi": "means several", "rope": "is no encoding"}.items():
        with pytest.raises(UserError, match=f"--against: '{against}' {problem}"):
            compared(encodings(rows), against)
        with pytest.raises(UserError, match=f"--against: '{against}' {problem}"):
            page_of_rows(rows, [], {}, against)


def test_the_page_compares_with_the_lowest_encoding_that_has_all_three_seeds(rows):
    found = kinds([row for row in rows if row["protocol"] == "equal_tokens"])
    assert reference_of(found, None) == "mep_free, window none"
