"""Looking at token files: lengths, tokens in use and text."""

import json

import numpy as np
import pytest

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenFile, TokenWriter
from tools.inspect_data import lengths, main, usage

BYTES = build_tokenizer("CharLevelTokenizer")
CARD = {"type": "CharLevelTokenizer", "hash": BYTES.hash, "vocab_size": 512, "eod": 0}
TEXTS = ["the cat\n", "", "a much longer text than the others, " * 40]


@pytest.fixture
def prefix(tmp_path):
    size = sum(len(text.encode()) for text in TEXTS)
    meta = {"corpus": "cats", "tokenizer": CARD, "text_bytes": size}
    with TokenWriter(tmp_path / "c", np.uint16, meta=meta) as writer:
        for text in TEXTS:
            writer.add([*BYTES.encode(text), BYTES.eod])
    return tmp_path / "c"


def test_lengths_are_those_of_plain_counting():
    sizes = np.random.default_rng(2).integers(0, 5000, 501)
    found = lengths(sizes, [512, 16, 1024])
    assert [one["length"] for one in found["beyond"]] == [16, 512, 1024]
    assert (found["shortest"], found["longest"]) == (min(sizes), max(sizes))
    assert (found["median"], found["mean"]) == (np.median(sizes), sizes.mean())
    for one in found["beyond"]:
        long = [int(size) for size in sizes if size >= one["length"]]
        assert one["documents"] == len(long)
        assert one["document_share"] == pytest.approx(len(long) / 501)
        assert one["token_share"] == pytest.approx(sum(long) / sizes.sum())
        beyond = sum(size - one["length"] for size in long)
        assert one["context_share"] == pytest.approx(beyond / sizes.sum())
        assert one["windows"] == sum(size // one["length"] for size in long)


def test_tokens_are_counted_in_all_documents_or_in_some(prefix):
    tokens = TokenFile.open(prefix)
    found = usage(tokens, BYTES)
    text = "".join(TEXTS)
    assert found["documents"] == 3
    assert next(iter(found["most"].items())) == (ord(" "), text.count(" "))
    assert found["unused"] == 512 - len({*text.encode(), 0})
    assert found["tokens"] == tokens.tokens
    some = usage(tokens, BYTES, most=tokens.tokens - 1)
    assert (some["documents"], some["tokens"]) == (2, tokens.tokens - 1)


def test_the_text_and_the_numbers_name_what_is_there(prefix, tmp_path, capsys):
    assert main([str(prefix), "--json", str(tmp_path / "facts.json"), "--samples", "3"]) == 0
    text = capsys.readouterr().out
    for words in (
        f"{prefix} (cats)\n3 documents, {len(''.join(TEXTS)) + 3:,} tokens (uint16) of CharLevel",
        "Each document ends with token 0, which no length below counts.",
        "bytes: 1.00 bytes per token.",
        "--- document 0, 9 tokens, begins ---\nthe cat\n",
    ):
        assert words in text
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["end_of_document"] == 0
    assert facts["lengths"]["beyond"][0]["length"] == 512
    assert facts["lengths"]["longest"] == len(TEXTS[2])
    (tmp_path / "c.json").unlink()
    assert main([str(prefix), "--samples", "1"]) == 0
    assert "116 104 101 32 99 97 116 10 0" in capsys.readouterr().out, "ids without a tokenizer"
    assert main([str(prefix), "--lengths", "0"]) == 1
    assert "--lengths are 1 or more" in capsys.readouterr().err
