"""The command that prepares data: its files, its card, its messages."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import description
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from prepare_data import run
from tools.merge_data import main as merge

TEXTS = [
    "the cat sat on the mat\n",
    "",
    "naïve — 日本語 🙂",
    " \n",
    "def f(x):\n    return x\n" * 50,
]


@pytest.fixture
def text():
    path = Path("in.jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def own(text, folder, *more):
    words = ["--input", text, "--name", "mine", "-d", folder]
    return run([*map(str, words), *(more or ["--vocab-size", "300"])])


def everything(folder=Path()):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def yaml_lines(summary):
    lines = summary.split("in your YAML:\n")[1].split("\n")
    return dict(line.strip().split(": ") for line in lines)


def test_a_text_becomes_token_files_with_a_tokenizer_and_a_card(text):
    summary = own(text, ".")
    prefix = Path("mine/mine_text_document")
    tokens = TokenFile(prefix)
    tokenizer = build_tokenizer("HFTokenizer", "mine/tokenizer.json")
    documents = [document for document in TEXTS if document]
    assert len(tokens) == len(documents)
    for index, document in enumerate(documents):
        assert tokens.read(index)[-1] == tokenizer.eod
        assert tokenizer.decode(tokens.read(index)[:-1].tolist()) == document
    card = tokens.meta
    assert card["tokenizer"] == description(tokenizer) | {"trained_for": 300}
    assert (card["corpus"], card["sources"][0]["path"]) == ("mine", "in.jsonl")
    assert card["text_bytes"] == sum(len(document.encode()) for document in documents)
    assert f"mine: {len(tokens):,} documents, {tokens.tokens:,} tokens (uint16)" in summary
    assert yaml_lines(summary)["vocab_file"] == "mine/tokenizer.json"
    before = everything()
    assert own(text, ".") == f"already prepared\n{summary}"
    assert everything() == before


def test_documents_keep_their_order_and_those_without_text_are_left_out(tmp_path, text):
    text = text.rename(os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl"))
    summary = own(text, ".", "-t", "CharLevelTokenizer")
    tokens = TokenFile("mine/mine_text_document")
    got = [tokens.read(index).astype(np.uint8).tobytes() for index in range(len(tokens))]
    assert got == [document.encode() + b"\0" for document in TEXTS if document]
    assert "left out, blank document: 1\n" in summary
    assert tokens.meta["skips"] == {"blank document": 1}
    sizes = [len(document.encode()) + 1 for document in TEXTS if document]
    parts = f"train {sum(sizes):,} tokens (4 documents), valid 0 tokens (0 documents), test 0 tok"
    assert f"split 949,50,1: {parts}" in summary
    verify_summary = run(["--verify", str(tokens.prefix)])
    assert verify_summary.endswith("are undamaged (sha256 and vocabulary)")


def test_what_a_tokenizer_cannot_say_is_counted():
    text = Path("in.txt")
    text.write_text("a b\tc")
    pieces = [["<unk>", 0.0], ["a", -1.0], ["b", -1.0]]
    inner = Tokenizer(models.Unigram([tuple(piece) for piece in pieces], unk_id=0))
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save("t.json")
    summary = own(text, ".", "--vocab-file", "t.json")
    assert "left out, text that became the unknown token: 2" in summary


def test_what_was_prepared_from_something_else_is_kept_unless_overwritten(text):
    data = Path("data")
    own(text, data)
    before = everything(data)
    other = Path("other.txt")
    other.write_text("other text")
    for source, words, message in (
        (text, "--vocab_size=290", "prepared with other tokenizer - choose another --name or -d"),
        (other, "-t CharLevelTokenizer", "prepared with other tokenizer and sources"),
    ):
        with pytest.raises(UserError, match=message):
            own(source, data, *words.split())
    assert everything(data) == before
    os.truncate(data / "mine" / "mine_text_document.bin", 10)
    with pytest.raises(UserError, match=r"\.bin: has 10 bytes, but"):
        own(text, data)
    own(other, data, "--vocab-size", "300", "--overwrite")
    assert len(TokenFile(data / "mine" / "mine_text_document")) == 1


def test_a_fault_leaves_everything_as_it_was(text, monkeypatch):
    data = Path("data")
    bad = Path("bad.jsonl")
    cases = {
        '{"text": "fine"}\n{"text": \n': r"bad\.jsonl:2: cannot be read as JSON",
        '{"text": ""}\n\n': "mine_text_document: there are no tokens to write - the input",
    }

    def full(file):
        raise OSError(28, "No space left on device")

    for exists in (False, True):
        if exists:
            own(text, data)
        before = everything(data)
        for content, message in cases.items():
            bad.write_text(content)
            with pytest.raises(UserError, match=message):
                own(bad, data, "--vocab-size", "300", "--overwrite")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(UserError, match=r"No space left on device.* - free some space"):
                own(text, data, "--vocab-size", "280", "--overwrite")
        assert everything(data) == before
        assert data.exists() == exists
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"-d: .*file.*cannot be written \(.* directory|exists\)"):
        own(text, "file")


def test_groups_of_files_are_merged_to_the_bytes_of_one_run(text):
    inputs = Path("texts")
    inputs.mkdir()
    for number, name in enumerate(("b.txt", "a.txt", "z.txt")):
        (inputs / name).write_text(f"text {number} of {name}\n" * (number + 1))
    own(inputs, "data", "-t", "CharLevelTokenizer")
    for name in ("a", "b", "z"):
        own(inputs / f"{name}.txt", f"data-{name}", "-t", "CharLevelTokenizer")
    parts = [f"data-{name}/mine/mine_text_document" for name in ("a", "b", "z")]
    whole, merged = Path("data/mine/mine_text_document"), Path("merged")
    assert merge([*parts, "-o", str(merged)]) == 0
    for suffix in (".bin", ".idx"):
        expected = whole.with_name(whole.name + suffix).read_bytes()
        assert merged.with_suffix(suffix).read_bytes() == expected
    cards = [TokenFile(prefix).meta for prefix in (whole, merged)]
    for key in ("tokenizer", "sources", "text_bytes", "documents", "dtype"):
        assert cards[0][key] == cards[1][key]
