"""The benchmark of all encodings on a tiny model: what it writes, never how fast it was."""

import json

import pytest
from encodings_table import BEGIN, END, main, options_in_file

from megatron.positions import REGISTRY, Shape, build

SIZE = ["--hidden", "24", "--layers", "2", "--heads", "3", "--vocab", "40", "--train_length", "16"]
SHORT = [*SIZE, "--length", "32", "--rounds", "1", "--seconds", "0.1", "--no-memory"]


def test_every_encoding_has_a_line_between_the_marks(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nan old table\n{END}\nafter\n")
    words = ["--output", str(tmp_path / "all.json"), "--into", str(page)]
    assert main([*SHORT, *words]) == 0
    printed = capsys.readouterr().out
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n`python")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "an old table" not in text
    assert printed.strip() in text
    for name in REGISTRY:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert "not run" not in line
        assert "failed" not in line
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert {(row["pos_emb"], row["training"]) for row in rows} == {
        (name, training) for name in REGISTRY for training in (True, False)
    }
    assert all(row["tokens_per_second"] > 0 for row in rows)
    backends = {row["pos_emb"]: row["backend"] for row in rows}
    assert (backends["cope"], backends["rotary"]) == ("eager", "sdpa")


def test_options_are_those_of_the_files():
    for name in REGISTRY:
        build(name, Shape(3, 8, 24, 16), **options_in_file(name, 32))
    assert options_in_file("learned", 32)["max_positions"] == 32
    assert options_in_file("alibi", 32)["slope_factor"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--encodings", "rotery"], "--encodings: no encoding is called rotery"),
        (["--heads", "5"], "--hidden: 24 cannot be split over --heads 5"),
        (["--into", "nowhere.md"], "--into: nowhere.md cannot be read (No such file or directory)"),
        (["--into", "README.md"], "--into: README.md has not the lines '<!-- table of encodings"),
    ],
)
def test_what_the_user_got_wrong_is_one_message(words, message, capsys):
    assert main([*SHORT, *words]) == 1
    assert message in capsys.readouterr().err
