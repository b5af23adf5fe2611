"""A continuation's text comes as soon as it is certain, and ends before a stop string."""

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation.written import Written, begun

TEXT = "Zwölf Bäume — 漢字 and 🎉🎉 end. the end\nof it"


@pytest.fixture(scope="module", params=["CharLevelTokenizer", "HFTokenizer"])
def tokenizer(request, tmp_path_factory):
    """Bytes, and pairs of bytes that were joined."""
    if request.param == "CharLevelTokenizer":
        return build_tokenizer(request.param, None, None)
    theirs = HFTokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    theirs.train_from_iterator([TEXT] * 3, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    theirs.save(str(path))
    return build_tokenizer("HFTokenizer", str(path), None)


def pieces(tokenizer, ids, prompt=(), stops=()):
    """What is taken after each token and at the end, and the writer."""
    written, taken = Written(tokenizer, prompt, stops), []
    for token in ids:
        if written.stopped:
            break
        written.add(token)
        taken.append(written.take())
    written.finish()
    return [*taken, written.take()], written


def test_pieces_make_the_text_and_none_ends_inside_a_character(tokenizer):
    taken, written = pieces(tokenizer, tokenizer.encode(TEXT))
    assert "".join(taken) == written.text == TEXT
    assert "\ufffd" not in "".join(taken)


@pytest.mark.parametrize("cut", range(1, 30, 3))
def test_a_continuation_is_the_text_behind_the_prompt(tokenizer, cut):
    ids = tokenizer.encode(TEXT)
    begin = tokenizer.decode(ids[:cut])
    if begin.endswith("\ufffd"):
        pytest.skip("a prompt is whole characters")
    taken, _ = pieces(tokenizer, ids[cut:], prompt=ids[:cut])
    assert begin + "".join(taken) == TEXT


@pytest.mark.parametrize("stop", ["🎉", "end", " the", "\n", "漢字 and", "Zwölf"])
def test_a_text_ends_before_its_first_stop_string(tokenizer, stop):
    taken, written = pieces(tokenizer, tokenizer.encode(TEXT), stops=["never", stop])
    assert written.stopped
    assert "".join(taken) == TEXT[: TEXT.index(stop)]


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    taken, _ = pieces(tokenizer, tokenizer.encode(TEXT), stops=["end", "Bäume", "and"])
    assert "".join(taken) == "Zwölf "


def test_the_beginning_of_a_stop_string_waits_and_comes_at_the_end(tokenizer):
    taken, written = pieces(tokenizer, tokenizer.encode("a b STO"), stops=["STOP"])
    assert not written.stopped
    assert "".join(taken[:-1]) == "a b "
    assert taken[-1] == "STO"


def test_bytes_that_are_no_character_do_not_wait_for_ever():
    tokenizer = build_tokenizer("CharLevelTokenizer", None, None)
    broken = [0xF0] * 40 + list(b"text")
    taken, written = pieces(tokenizer, broken)
    assert "".join(taken[:20]), "after some bytes it is certain that they are none"
    assert written.text.endswith("text")


@pytest.mark.parametrize(
    ("text", "stop", "count"),
    [("abc", "cd", 1), ("abc", "bcd", 2), ("abc", "abc", 0), ("", "x", 0), ("aaa", "aab", 2)],
)
def test_what_may_begin_a_stop_string_is_counted(text, stop, count):
    assert begun(text, stop) == count
