"""Samples are those of GPT-NeoX, token for token; their order is kept on disk."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.samples import build_split, split_documents
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
RUNS = json.loads((GOLDEN / "expected.json").read_text())["runs"]
MAPS_OF_GOLDEN = "08c2d7ed0173c978"
TEST_SAMPLES = 10  # what the reference was asked for in the test part; expected.json does not say


@pytest.fixture
def corpus():
    for suffix in (".bin", ".idx"):
        shutil.copyfile(GOLDEN / f"corpus_text_document{suffix}", Path(f"corpus{suffix}"))
    return TokenFile("corpus")


def write(prefix, sizes):
    """Documents whose tokens count upwards, so that every token has its own value."""
    first = np.concatenate([[0], np.cumsum(sizes)])
    with TokenWriter(prefix, np.int32) as writer:
        for start, size in zip(first, sizes, strict=False):
            writer.add(np.arange(start, start + size))
    return TokenFile(prefix)


def test_samples_are_those_of_the_reference_token_for_token(corpus):
    for run in RUNS:
        part = run["split"]
        length = run["train_seq_length"] if part == "train" else run["valid_seq_length"]
        count = {"train": run["num_train"], "valid": run["num_valid"], "test": TEST_SAMPLES}[part]
        expected = np.load(GOLDEN / "expected_samples.npz")[run["array"]]
        for _ in ("built", "from the cache"):
            samples = build_split(corpus, "949,50,1", part, length, 1235, count)
            assert len(samples) == run["len"]
            got = np.stack([samples[i] for i in range(len(expected))])
            assert got.dtype == np.int64
            np.testing.assert_array_equal(got, expected)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(
        lambda sizes: sum(sizes) > 1
    ),
    length=st.integers(1, 20),
    count=st.integers(2, 40),
)
def test_samples_overlap_by_one_token_whatever_the_documents(sizes, length, count):
    """Which order the reference shuffles is in the golden samples."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = write(Path(folder) / "c", sizes)
        samples = build_split(tokens, "1,0,0", "train", length, 1, count)
        assert len(samples) >= count - 1
        stream = np.concatenate([tokens.read(int(document)) for document in samples.maps.documents])
        for index, place in enumerate(samples.maps.order[:-1].tolist()):
            expected = stream[place * length : (place + 1) * length + 1]
            assert samples[index].tolist() == expected.tolist()


def test_parts_are_cut_where_the_reference_cuts_them_and_empty_ones_are_named(tmp_path, caplog):
    cases = {  # GPT-NeoX's get_train_valid_test_split_, run by hand
        ("949,50,1", 600): [0, 569, 599, 600],
        ("969/30/1", 100): [0, 97, 100, 100],
        ("1,1", 5): [0, 3, 5, 5],  # 2.5 rounds to 2 twice; every bound gets the missing document
        ("1,1,1", 5): [0, 1, 3, 5],  # 1.67 rounds to 2 three times; the surplus is taken away
        ("0.1,0.2,0.3", 3): [0, 1, 2, 3],  # 0.6000000000000001 in all, on every version of Python
    }
    for (split, count), bounds in cases.items():
        tokens = write(f"c{split[0]}{count}{len(split)}", [1] * count)
        for part, start, stop in zip(("train", "valid", "test"), bounds, bounds[1:], strict=False):
            if stop > start:
                assert split_documents(tokens, split, part) == range(start, stop)
    for sizes, split, part, message in (
        ([9, 0], "1,1", "valid", "the valid part has no tokens - give valid"),
        ([9], "1,1,1", "test", "of 1 documents leaves none for test - give"),
    ):
        with pytest.raises(UserError, match=message):
            build_split(write(tmp_path / part, sizes), split, part, 4)
    with caplog.at_level(logging.WARNING):
        samples = build_split(write("c", [9, 5]), "1,1", "valid", 8, num_samples=2)
    assert "the valid part has only 5 tokens, so samples of 8 repeat the same text" in caplog.text
    for index in (len(samples), -1):
        with pytest.raises(IndexError, match=f"sample {index} of {len(samples)}"):
            samples[index]


# --- The order on disk ---


def maps_folder(corpus):
    [folder] = (corpus.prefix.parent / "corpus_index_maps").glob("[0-9a-f]*")
    return folder


def first(corpus):
    return build_split(corpus, length=64, seed=1235)[0].tolist()


def test_index_maps_are_kept_by_plan_and_used_again(corpus):
    expected = first(corpus)
    before = maps_folder(corpus).stat().st_mtime_ns
    assert first(corpus) == expected
    assert maps_folder(corpus).stat().st_mtime_ns == before
    assert maps_folder(corpus).name == MAPS_OF_GOLDEN  # those of earlier versions are used again
    for changed in ({"seed": 1}, {"length": 65}, {"part": "train"}, {"num_samples": 10_000}):
        build_split(corpus, **{"length": 64, "seed": 1235} | changed)
    assert len(list(Path("corpus_index_maps").glob("[0-9a-f]*"))) == 5


DAMAGES = {
    "documents": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "ends": lambda path: np.save(path, np.zeros(3, dtype=np.int64)),
    "order": lambda path: np.save(path, np.array([{}]), allow_pickle=True),
}


def test_damaged_index_maps_are_built_anew(corpus, caplog):
    expected = first(corpus)
    for name, damage in DAMAGES.items():
        damage(maps_folder(corpus) / f"{name}.npy")
        assert first(corpus) == expected
        assert "building the index maps" in caplog.text
        caplog.clear()
    assert first(corpus) == expected
    assert not caplog.text


def test_a_place_where_maps_cannot_be_kept_works_without(corpus, caplog):
    expected = first(corpus)
    shutil.rmtree(corpus.prefix.parent / "corpus_index_maps")
    (corpus.prefix.parent / "corpus_index_maps").write_text("a file where the folder should be")
    assert first(corpus) == expected
    assert "index maps cannot be stored, so every start builds them again" in caplog.text
