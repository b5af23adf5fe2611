"""Long texts in pieces: the tokens of the whole, one piece after another."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, normalizers, pre_tokenizers
from tokenizers import Regex as Pattern

from megatron.data.tokenizers import tokenizer as module
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.hugging_face import Subwords
from megatron.data.tokenizers.tokenizer import pieces
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from tests.support import modules

SPACES = " \n\t\r\x0b\x0c\x1c\x85\xa0\u1680\u180e\u2003\u2028\u3000\u200b\ufeff"
WORDS = st.sampled_from(
    [*SPACES, "  ", "\n\n", "'s", "'", "a", "é", "e\u0301", "7", "²", "中", "!"]
)
TEXTS = st.lists(st.one_of(WORDS, st.characters(exclude_categories=["Cs"])), max_size=40)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    path.write_text(train_tokenizer(modules()[:20] + [" \n \n\n  's 't é"] * 9, 600))
    return build_tokenizer("HFTokenizer", path)


def check(tokenizer, text, size):
    parts = list(pieces(text, where="text", cuttable=tokenizer.cuttable, size=size))
    assert "".join(parts) == text
    assert list(chain(*tokenizer.encode_batch(parts))) == tokenizer.encode(text)
    return parts


@settings(max_examples=100, deadline=None)
@given(parts=TEXTS, size=st.integers(1, 9))
def test_pieces_have_the_tokens_of_the_whole(trained, parts, size):
    check(trained, "".join(parts), size)


def test_a_real_text_is_cut_often(trained):
    text = "".join(modules()[:10])
    assert len(check(trained, text, 500)) > len(text) / 600


def test_what_cannot_be_cut_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "UNBROKEN", 10)
    assert list(pieces("a" * 10, where="c: document 1", size=4)) == ["a" * 10]
    with pytest.raises(UserError, match="c: document 1: has 11 characters without a space or line"):
        list(pieces("a" * 11, where="c: document 1", size=4))
    with pytest.raises(UserError, match="without a place where this tokenizer may be cut"):
        list(pieces("a a a a a a", where="c: document 1", size=4, cuttable=False))


def is_cuttable(**parts):
    inner = ByteLevelBPETokenizer()._tokenizer
    inner.add_special_tokens(["<|endoftext|>"])
    added = parts.pop("added", [])
    for name, part in parts.items():
        setattr(inner, name, part)
    inner.add_tokens(added)
    return Subwords("HFTokenizer", inner, 0, "").cuttable


def test_a_cut_is_safe_only_where_that_is_proved():
    byte_level = pre_tokenizers.ByteLevel
    plain = {"pre_tokenizer": byte_level(add_prefix_space=False)}
    assert is_cuttable(**plain)
    assert is_cuttable(**plain, normalizer=normalizers.NFC(), added=["  "])
    assert not is_cuttable(**plain, added=["a b"])
    assert not is_cuttable(pre_tokenizer=byte_level(add_prefix_space=True))
    assert not is_cuttable(pre_tokenizer=byte_level(use_regex=False))
    assert not is_cuttable(pre_tokenizer=pre_tokenizers.Split(Pattern("a+"), "isolated"))
