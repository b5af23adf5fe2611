"""Blends are those of GPT-NeoX: which corpus each window is of, and every token."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.parts import (
    Blend,
    Turns,
    samples_of_each,
    shares,
    weights_by_documents,
)
from megatron.data.samples import build_split
from megatron.data.tokens import TokenFile, TokenWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
EXPECTED = json.loads((GOLDEN / "blends.json").read_text())
CHOICES = [  # by two, four and thirty corpora, and a weight next to 0, in the short version
    pytest.param(case, marks=[] if number in (2, 6, 8, 9) else pytest.mark.campaign)
    for number, case in enumerate(EXPECTED["choices"])
]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCD"


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """The documents of the golden corpus, divided into three token files."""
    whole = TokenFile(GOLDEN / "corpus_text_document")
    ranges = {}
    for case in EXPECTED["blends"]:
        ranges |= case["corpora"]
    files = {}
    for name, (first, stop) in ranges.items():
        prefix = tmp_path_factory.mktemp(name) / name
        with TokenWriter(prefix, np.uint16) as writer:
            for document in range(first, stop):
                writer.add(whole.read(document))
        files[name] = TokenFile(prefix)
    return files


@pytest.mark.parametrize("case", EXPECTED["blends"], ids=lambda case: case["name"])
def test_blends_are_those_of_the_reference_token_for_token(corpora, case):
    files = [corpora[name] for name in case["corpora"]]
    weights = case["given_weights"]
    if weights is None:
        weights = weights_by_documents([len(tokens) for tokens in files], case["alpha"])
    counts = samples_of_each(weights, case["num_samples"])
    assert (shares(weights), counts) == (case["weights"], case["of_each"])
    length, seed = case["length"], case["seed"]
    samples = [
        build_split(tokens, "1,0,0", "train", length, seed, count)
        for tokens, count in zip(files, counts, strict=True)
    ]
    blend = Blend(samples, weights)
    assert (len(blend), list(map(len, samples))) == (case["len"], case["lens"])
    golden = np.load(GOLDEN / "blends.npz")[case["name"]]
    for number, expected in zip(case["kept"], golden, strict=True):
        np.testing.assert_array_equal(blend[number], expected)
    whole = np.stack([blend[number] for number in range(len(blend))])
    assert hashlib.sha256(whole.tobytes()).hexdigest() == case["sha256_of_all_as_int64"]
    with pytest.raises(IndexError, match=f"sample {len(blend)} of {len(blend)}"):
        blend[len(blend)]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: str(case["weights"])[:20])
def test_each_window_is_of_the_corpus_that_the_reference_chooses(case):
    turns = Turns(case["weights"])
    # The last block first: its counts are computed without the blocks before it.
    last = case["size"] - 1
    corpus, number = turns[last]
    every = [turns[index] for index in range(case["size"])]
    assert every[last] == (corpus, number)
    choices = np.array([corpus for corpus, _ in every], dtype=np.uint8)
    numbers = np.array([number for _, number in every], dtype=np.int64)
    assert "".join(LETTERS[corpus] for corpus in choices[:120]) == case["first"]
    digest = hashlib.sha256(choices.tobytes()).hexdigest()
    assert digest == case["sha256_of_choices_as_uint8"]
    assert hashlib.sha256(numbers.tobytes()).hexdigest() == case["sha256_of_numbers_as_int64"]
