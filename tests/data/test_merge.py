"""Several token files as one: the same documents, in order, with the sources of all."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import TokenFile, TokenWriter, verify
from megatron.errors import UserError
from tools.merge_data import main, merge

TOKENIZER = {"type": "HFTokenizer", "hash": "aaaa", "vocab_size": 500, "eod": 0}
FIRST = [[1, 2, 3, 0], [], [4, 0]]
SECOND = [[300, 0], [5, 6, 0]]


def write(prefix, documents, dtype=np.uint16, **card):
    meta = {"corpus": prefix.name, "tokenizer": TOKENIZER, **card} if card != {"card": None} else {}
    with TokenWriter(prefix, dtype, meta=meta) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def card_facts(number):
    return {
        "sources": [{"path": f"{number}.txt", "bytes": 10, "sha256": f"{number}" * 64}],
        "text_bytes": 10 * number,
        "blank": number,
        "skips": {"not text": number},
    }


@pytest.fixture
def pair(tmp_path):
    first = write(tmp_path / "a", FIRST, **card_facts(1))
    return first, write(tmp_path / "b", SECOND, **card_facts(2))


def test_the_documents_follow_each_other_and_the_card_knows_all_sources(pair, tmp_path, capsys):
    output = tmp_path / "new/both"
    assert main([*map(str, pair), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}: 5 documents, 11 tokens (uint16)\n"
    merged = TokenFile.open(output)
    assert [merged.read(number).tolist() for number in range(5)] == FIRST + SECOND
    assert "are whole (sha256 and vocabulary)" in verify(output)
    card = json.loads(Path(f"{output}.json").read_text())
    assert card["corpus"] == "a + b"
    assert card["tokenizer"] == TOKENIZER
    assert [source["path"] for source in card["sources"]] == ["1.txt", "2.txt"]
    assert [(part["corpus"], part["documents"]) for part in card["merged"]] == [("a", 3), ("b", 2)]
    assert (card["text_bytes"], card["blank"], card["skips"]) == (30, 3, {"not text": 3})
    assert "skipped" not in card, "neither file says it"
    assert card["command"] == ["merge_data.py", *map(str, pair), "-o", str(output)]
    assert (card["dtype"], card["date"][-6:]) == ("uint16", "+00:00")


def test_the_bin_is_both_bins_and_the_index_that_of_writing_all_at_once(pair, tmp_path):
    # So does GPT-NeoX, but it loses the index of documents, which nothing reads.
    merge(pair, tmp_path / "both")
    bins = [Path(f"{prefix}.bin").read_bytes() for prefix in pair]
    assert (tmp_path / "both.bin").read_bytes() == b"".join(bins)
    at_once = write(tmp_path / "at_once", FIRST + SECOND)
    assert (tmp_path / "both.idx").read_bytes() == Path(f"{at_once}.idx").read_bytes()


def test_the_dtype_holds_the_ids_of_all(pair, tmp_path):
    wide = write(tmp_path / "wide", [[7, 0]], np.int32)
    merged = merge([*pair, wide], tmp_path / "three")
    assert merged.dtype == np.int32
    assert [merged.read(number).tolist() for number in range(6)] == [*FIRST, *SECOND, [7, 0]]


def test_the_same_source_in_two_files_is_a_warning(pair, tmp_path, capsys):
    again = write(tmp_path / "again", SECOND, **card_facts(1))
    merge([pair[0], again], tmp_path / "both")
    assert f"there several times: {'1' * 12}" in capsys.readouterr().err


def test_files_without_a_card_are_taken_only_where_the_user_says_so(pair, tmp_path, capsys):
    bare = write(tmp_path / "bare", SECOND, card=None)
    with pytest.raises(UserError, match=r"has no .json that names its tokenizer"):
        merge([pair[0], bare], tmp_path / "both")
    merged = merge([pair[0], bare], tmp_path / "both", assume_same_tokenizer=True)
    sources = merged.meta["sources"]
    assert sources[1]["path"] == f"{bare}.bin"
    assert len(sources[1]["sha256"]) == 64
    assert "text_bytes" not in merged.meta, "one of them is unknown"
    other = write(tmp_path / "other", SECOND, card=None)
    words = [str(bare), str(other), "-o", str(tmp_path / "none"), "--assume-same-tokenizer"]
    assert main(words) == 0
    assert "no card was written" in capsys.readouterr().out
    assert not (tmp_path / "none.json").exists()


def test_an_id_beyond_the_vocabulary_of_the_others_is_refused(pair, tmp_path):
    bare = write(tmp_path / "bare", [[501]], card=None)
    with pytest.raises(UserError, match="token 501, but the vocabulary ends at 499"):
        merge([pair[0], bare], tmp_path / "both", assume_same_tokenizer=True)
    assert not list(tmp_path.glob("*both*"))


def test_what_cannot_be_merged_is_one_message_and_changes_nothing(pair, tmp_path):
    first, second = map(str, pair)
    other = {**TOKENIZER, "hash": "bbbb"}
    strange = str(write(tmp_path / "strange", SECOND, tokenizer=other))
    damaged = str(write(tmp_path / "damaged", SECOND, **card_facts(3)))
    Path(f"{damaged}.bin").write_bytes(b"xx")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    new = str(tmp_path / "new")
    for words, message in {
        (first, "-o", new): "one file cannot be merged - give two",
        (first, second, first, "-o", new): "is given twice",
        (first, second, "-o", second): "or is also the output - give each once",
        (first, second, "-o", "s3://bucket/c"): "-o: s3://bucket/c is an address - give a place",
        (first, second, "-o", strange): "exists already - choose another name, or add --overwrite",
        (first, strange, "-o", new): "written by several tokenizers",
        (first, damaged, "-o", new): "damaged.bin: is cut off",
        (first, str(tmp_path / "missing"), "-o", new): "there are no token files",
        (first, second, "--name", "a\x1bb", "-o", new): "has a control character",
    }.items():
        fault = _message(words)
        assert message in fault, fault
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def _message(words):
    run = main.__wrapped__  # without the last resort
    with pytest.raises(UserError) as fault:
        run(list(words))
    return str(fault.value)
