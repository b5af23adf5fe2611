import re
from itertools import islice

import pytest

from megatron.data.tokenizers.build import build_tokenizer
from tests.support import modules
from tools.train_tokenizer import main


@pytest.fixture
def texts(tmp_path):
    """Forty documents, of which the twentieth and the fortieth are held out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(islice(modules(), 40), 1):
        (folder / f"{number:02}.txt").write_text(text[:3000], encoding="utf-8")
    return folder


KINDS = {
    "HFTokenizer": ("tokenizer.json", []),
    "SPMTokenizer": ("t.model", ["--model", "bpe"]),
    "SPMTokenizer ": ("t.model", ["--model", "unigram"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_gives_the_same_tokenizer_and_its_bytes_per_token(
    kind, texts, tmp_path, capsys
):
    name, options = KINDS[kind]
    words = ["--input", str(texts), "--vocab-size", "400", *options, "-o"]
    assert main([*words, str(tmp_path / "one" / name)]) == 0
    told = capsys.readouterr().out
    assert main([*words, str(tmp_path / "two" / name)]) == 0
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    tokenizer = build_tokenizer(kind.strip(), tmp_path / "one" / name)
    held_out = [(texts / f"{number}.txt").read_text(encoding="utf-8") for number in (20, 40)]
    tokens = sum(len(tokenizer.encode(text)) for text in held_out)
    text_bytes = sum(len(text.encode()) for text in held_out)
    assert f"{text_bytes / tokens:.3f} bytes per token on {text_bytes:,} bytes of held-out" in told
    assert re.search(rf"{tokenizer.hash}, 400 entries\n", told)
    assert tokenizer.decode(tokenizer.encode(held_out[0])) == held_out[0]
    assert tokenizer.token_bytes()[tokenizer.encode(held_out[0])].sum() in (
        len(held_out[0].encode()),
        len(held_out[0].encode()) + 1,  # the space that SentencePiece puts before a text
    )


def test_what_is_held_out_is_not_learned_from(texts, tmp_path):
    words = ["--input", str(texts), "--vocab-size", "400", "-o"]
    assert main([*words, str(tmp_path / "before.json")]) == 0
    (texts / "20.txt").write_text("never seen before " * 500)
    assert main([*words, str(tmp_path / "after.json")]) == 0
    assert (tmp_path / "before.json").read_bytes() == (tmp_path / "after.json").read_bytes()


def test_few_documents_are_all_learned_from(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 30)
    words = ["--input", str(tmp_path / "a.txt"), "--vocab-size", "270", "--characters", "100"]
    assert main([*words, "-o", str(tmp_path / "t.json")]) == 0
    assert "nothing was held out to measure it on: fewer than 20" in (capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "t.json"], "what is it to learn from? - name a corpus (stdlib), or give --input"),
        (["stdlib", "--input", "a.txt", "-o", "t.json"], "what is it to learn from?"),
        (["--input", "a.txt", "-o", "t.model"], "-o: t.model does not end with .json, as the file"),
        (["--input", "a.txt", "--model", "bpe", "-o", "t.json"], "does not end with .model, as"),
        (["--input", "a.txt", "-o", "old.json"], "-o: old.json exists already - choose another"),
        (["--input", "a.txt", "-o", "t.json", "--characters", "0"], "--characters: 0 is no text"),
        (["--input", "empty.txt", "-o", "t.json"], "has no text to learn from - give files"),
        (
            ["--input", "a.txt", "--model", "unigram", "-o", "t.model"],
            "vocab_size: 300 entries cannot be learned from this text (",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_message_and_loses_nothing(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "old.json").write_text("old")
    assert main([*words, "--vocab-size", "300"]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert (tmp_path / "old.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty.txt", "old.json"]
