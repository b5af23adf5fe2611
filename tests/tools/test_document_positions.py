"""docs/positions.md is what the registry says, and every picture that it shows is there."""

import re

from megatron.positions import REGISTRY, options_of
from megatron.report.catalogue import PAGE, first_sentence, has_picture, page, paragraph
from tools.document_positions import main


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_every_picture_exists_and_none_is_left_over():
    shown = set(re.findall(r"\]\(positions/(\w+)\.svg\)", PAGE.read_text(encoding="utf-8")))
    assert shown == {name for name in REGISTRY if has_picture(name)}
    assert shown == {path.stem for path in (PAGE.parent / "positions").glob("*")}, "run: make docs"


def test_every_encoding_says_its_formula_paper_options_numbers_and_cost():
    sections = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page(), flags=re.DOTALL | re.MULTILINE)
    )
    assert set(sections) == set(REGISTRY)
    for name, text in sections.items():
        assert len(paragraph(REGISTRY[name].__doc__)) > 10, name
        assert all(f"`{option}`" in text for option in options_of(name)), name
        assert not re.search(r"^\* .*: $", text, re.MULTILINE), f"{name}: an option has no meaning"
        assert re.search(r"Learned numbers: .*\. Cost: .*\.", text), name
    assert "https://arxiv.org/abs/2108.12409" in sections["alibi"]
    assert "Learned numbers: 24. Cost: a table by distance" in sections["kerple_log"]
    assert "Learned numbers: 384." in sections["t5"]  # 32 buckets, 12 heads
    assert "Learned numbers: 393,216." in sections["learned"]  # 512 positions of 768
    assert "Cost: eager attention" in sections["cope"]
    assert "`rpe`" in sections["t5"]
    # Several in one line, one that two options share, and one of the class that it extends.
    assert "* `base` (10000): slowest wavelength / 2π\n" in sections["rotary"]
    assert "* `beta_slow` (1): features with more than beta_fast" in sections["by_parts"]
    assert "Options of [by_parts](#by_parts): `attention_factor`, " in sections["yarn"]
    assert "Options of [path](#path): `rank`, `taps`." in sections["path_fox"]
    assert "* `kernels` ([exp, {exp: 0.5}, gaussian]): as for mep\n" in sections["mep_free"]


def test_a_sentence_ends_outside_parentheses():
    assert first_sentence("-s · d; as a kernel, exp(-s · d).") == "-s · d"
    assert first_sentence("x (a. b) at 0.5\nand more. Then this.") == "x (a. b) at 0.5 and more"
    assert first_sentence(None) == ""


def test_a_file_of_the_users_own_prints_its_sections_and_no_others(tmp_path, capsys, own_registry):
    (tmp_path / "mine.py").write_text(
        "from megatron.positions import Position, register\n\n\n"
        "@register('mine')\nclass Mine(Position):\n    '''Nothing | at all (arXiv 1234.56789).'''\n"
    )
    assert main(["--from", str(tmp_path / "mine.py")]) == 0
    printed = capsys.readouterr().out
    assert "| [mine](#mine) | Nothing \\| at all (arXiv 1234.56789) | 0 |" in printed
    assert re.findall(r"^## (\w+)", printed, flags=re.MULTILINE) == ["mine"]
    assert "# Positional encodings" not in printed.splitlines()
    assert "alibi" not in printed
    assert "[arXiv 1234.56789](https://arxiv.org/abs/1234.56789)" in printed
