"""tools/train_tokenizer.py: one text gives one tokenizer, measured on what is held out."""

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


def test_the_same_text_gives_the_same_tokenizer_and_its_bytes_per_token(texts, tmp_path, capsys):
    held_out = [(texts / f"{number}.txt").read_text(encoding="utf-8") for number in (20, 40)]
    text_bytes = sum(len(text.encode()) for text in held_out)
    paths = [tmp_path / f"{attempt}.json" for attempt in "ab"]
    for path in paths:
        assert main(["--input", str(texts), "--vocab-size", "400", "-o", str(path)]) == 0
    shown = capsys.readouterr().out
    assert paths[0].read_bytes() == paths[1].read_bytes()
    tokenizer = build_tokenizer("HFTokenizer", paths[0])
    tokens = sum(len(tokenizer.encode(text)) for text in held_out)
    rate = f"{text_bytes / tokens:.3f} bytes per token on {text_bytes:,} bytes of held-out"
    assert rate in shown
    assert f"{tokenizer.hash}, 400 entries\n" in shown


def test_what_is_held_out_is_not_learned_from(texts, tmp_path):
    words = ["--input", str(texts), "--vocab-size", "400", "-o"]
    assert main([*words, str(tmp_path / "before.json")]) == 0
    (texts / "20.txt").write_text("never seen before " * 500)
    assert main([*words, str(tmp_path / "after.json")]) == 0
    assert (tmp_path / "before.json").read_bytes() == (tmp_path / "after.json").read_bytes()


def test_what_cannot_be_trained_is_one_message_and_loses_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "old.json").write_text("old")
    for words, message in {
        "-o t.json": "what is it to learn from? - name a corpus (stdlib), or give --input",
        "--input a.txt -o t.model": "-o: t.model does not end with .json, as a tok",
        "--input a.txt -o old.json": "-o: old.json exists already - choose another",
        "--input empty.txt -o t.json": "has no text to learn from - give files",
    }.items():
        assert main([*words.split(), "--vocab-size", "300"]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "old.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty.txt", "old.json"]
