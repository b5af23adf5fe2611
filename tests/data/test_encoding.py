"""Words and several processes give the ids that the library gives for the whole text."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from megatron.data import encoding
from megatron.data.encoding import (
    Encoder,
    TokenizerFiles,
    batches_of,
    encode_in_order,
    words_of,
)
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError

SENTENCE = "it's the cat's 123 naïve cafés — “we'll see”, 日本語 и слово!\n\n"
SAMPLE = f"{SENTENCE}\tdef f(x):\n        return x\n" * 9
TRAINED = train_tokenizer([SAMPLE], 500)
ASCII = [chr(code) for code in range(128)]
SPACES = [" ", "\n", "\t", "\r", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u2003"]
SPACES += ["\u2028", "\u200b", "\u202f", "\u3000", "\ufeff"]
LETTERS = ["a", "é", "e\u0301", "\u0301", "ß", "я", "語", "²", "½", "٣", "ª", "'", "'ll", "…", "🙂"]


def files_of(folder, inner=None):
    """The files of a tokenizer of the library, as another process builds it."""
    path = folder / "tokenizer.json"
    path.write_text(inner.to_str() if inner else TRAINED)
    return TokenizerFiles("HFTokenizer", path)


def whole(texts, text=TRAINED):
    """The ids of each text, by the library alone."""
    inner = tokenizers.Tokenizer.from_str(text)
    inner.encode_special_tokens = True
    return [inner.encode(text, add_special_tokens=False).ids for text in texts]


def check(encoded, expected):
    assert [np.frombuffer(ids, np.uint16).tolist() for ids in encoded] == expected


def texts_of(alphabet, count=150, length=120):
    draw = random.Random(len(alphabet))
    return ["".join(draw.choices(alphabet, k=length)) for _ in range(count)]


def test_words_have_the_ids_of_the_whole_text(tmp_path):
    encoder = Encoder(files_of(tmp_path))
    assert encoder.tokenizer.by_words
    for alphabet in (ASCII, [*SPACES, "a", "1", "."], SPACES + LETTERS, ASCII + SPACES + LETTERS):
        texts = [*texts_of(alphabet), SAMPLE, "", " ", "<|endoftext|> x<|endoftext|>"]
        check(encoder.encode(texts), whole(texts))
        assert ["".join(words_of(text)) for text in texts] == texts
    inner = tokenizers.Tokenizer.from_str(TRAINED)
    inner.normalizer = normalizers.NFC()
    texts = texts_of([*"aeo \n", "\u0301", "\u0308", "\u1100", "\u1161"])
    check(Encoder(files_of(tmp_path, inner)).encode(texts), whole(texts, inner.to_str()))


def test_words_are_taken_only_where_that_is_proved(tmp_path):
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    prefix = pre_tokenizers.ByteLevel(add_prefix_space=True)
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    whole_words = pre_tokenizers.ByteLevel(use_regex=False)
    pattern = pre_tokenizers.Sequence([split, whole_words])
    for before, added, by_words in (
        (plain, [], True),
        (plain, ["cat"], False),
        (prefix, [], False),
        (whole_words, [], False),
        (pattern, [], False),
    ):
        inner = tokenizers.Tokenizer.from_str(TRAINED)
        inner.pre_tokenizer = before
        inner.add_tokens(added)
        encoder = Encoder(files_of(tmp_path, inner))
        assert encoder.tokenizer.by_words == by_words
        check(encoder.encode([SAMPLE]), whole([SAMPLE], inner.to_str()))


# --- Several processes ---

DOCUMENTS = ["", "a cat", "naïve 日本語\n", *(f"text {number} " * 30 for number in range(60))]


def test_two_processes_give_the_ids_of_the_library_in_order(tmp_path):
    expected = whole(DOCUMENTS)
    for workers in (1, 2):
        done = list(encode_in_order(batches_of(DOCUMENTS, 700), files_of(tmp_path), workers))
        assert [text for batch, _ in done for text in batch] == DOCUMENTS
        check([ids for _, encoded in done for ids in encoded], expected)


def test_a_lost_process_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "AHEAD", 1)
    ordered = encode_in_order(batches_of(DOCUMENTS, 700), files_of(tmp_path), 2)
    next(ordered)
    for process in encoding.multiprocessing.active_children():
        process.kill()
    with pytest.raises(UserError, match="--workers: an encoding process died \(killed or"):
        list(ordered)
