"""Several token files as one: the same documents, in order, with the sources of all."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import TokenFile, TokenWriter, verify
from tools.merge_data import main

TOKENIZER = {"type": "HFTokenizer", "hash": "aaaa", "vocab_size": 500, "eod": 0}
FIRST = [[1, 2, 3, 0], [], [4, 0]]
SECOND = [[300, 0], [5, 6, 0]]


def write(prefix, documents, dtype=np.uint16, number=0, **card):
    meta = {"corpus": prefix, "tokenizer": TOKENIZER, **card} if number else {}
    if number:
        meta["sources"] = [{"path": f"{number}.txt", "bytes": 10, "sha256": f"{number}" * 64}]
        meta["text_bytes"] = 10 * number
    with TokenWriter(prefix, dtype, meta=meta) as writer:
        for document in documents:
            writer.add(document)
    return prefix


@pytest.fixture
def pair():
    first = write("a", FIRST, number=1)
    return first, write("b", SECOND, number=2)


def test_the_documents_follow_each_other_and_the_card_knows_all_sources(pair, capsys):
    output = Path("new/both")
    assert main([*pair, "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}: 5 documents, 11 tokens (uint16)\n"
    merged = TokenFile(output)
    assert [merged.read(number).tolist() for number in range(5)] == FIRST + SECOND
    # So does GPT-NeoX, but it loses the index of documents, which nothing reads.
    at_once = write("at_once", FIRST + SECOND)
    for suffix in (".bin", ".idx"):
        assert Path(f"{output}{suffix}").read_bytes() == Path(f"{at_once}{suffix}").read_bytes()
    assert "are undamaged (sha256 and vocabulary)" in verify(output)
    card = json.loads(Path(f"{output}.json").read_text())
    assert card["corpus"] == "a + b"
    assert card["tokenizer"] == TOKENIZER
    assert [source["path"] for source in card["sources"]] == ["1.txt", "2.txt"]
    assert card["text_bytes"] == 30
    assert card["command"] == ["merge_data.py", *pair, "-o", str(output)]


def test_files_without_a_card_are_refused(pair, capsys):
    bare = write("bare", SECOND, np.int32)
    assert main([*pair, bare, "-o", "three"]) == 1
    assert "bare: was not written by the tokenizer of a (no card)" in capsys.readouterr().err
