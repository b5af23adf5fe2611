"""Looking at token files: lengths, tokens in use and text."""

from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from tools.inspect_data import main

BYTES = build_tokenizer("CharLevelTokenizer")
CARD = {"type": "CharLevelTokenizer", "hash": BYTES.hash, "vocab_size": 512, "eod": 0}
TEXTS = ["the cat\n", "", "a much longer text than the others, " * 40]


@pytest.fixture
def prefix():
    size = sum(len(text.encode()) for text in TEXTS)
    meta = {"corpus": "cats", "tokenizer": CARD, "text_bytes": size}
    with TokenWriter("c", np.uint16, meta=meta) as writer:
        for text in TEXTS:
            writer.add([*BYTES.encode(text), BYTES.eod])
    return Path("c")


def test_the_text_and_the_numbers_name_what_is_there(prefix, capsys):
    assert main([str(prefix), "--samples", "99999999", "--split", "2,1,0"]) == 0
    text = capsys.readouterr().out
    spaces = "".join(TEXTS).count(" ")
    unused = 512 - len({*"".join(TEXTS).encode(), 0})
    for words in (
        f"{prefix} (cats)\n3 documents, {len(''.join(TEXTS)) + 3:,} tokens (uint16) of CharLevel",
        "Each document ends with token 0, which no length below counts.",
        "bytes: 1.00 bytes per token.",
        f"Lengths: shortest 0, median 8, mean 483, longest {len(TEXTS[2]):,} tokens",
        "512             1    33.3%         99.4%          64.1%               2\n",
        f"Tokens of 3 of 3 documents: {unused} of 512 ids never occur",
        f"      32 {spaces:>14,}",
        "split 2,1,0: train 2 documents, 10 tokens; valid 1 documents, 1,441 tokens; test 0",
        "--- document 0, 9 tokens, begins ---\nthe cat\n",
    ):
        assert words in text
    Path("c.json").unlink()
    assert main([str(prefix), "--samples", "1"]) == 0
    assert "116 104 101 32 99 97 116 10 0" in capsys.readouterr().out, "ids without a tokenizer"
