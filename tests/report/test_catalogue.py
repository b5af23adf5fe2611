"""docs/positions.md is what the registry says, and every picture that it shows is there."""

import re

from megatron.positions import REGISTRY, options_of
from megatron.report.catalogue import PAGE, first_sentence, formula, has_picture, page


def test_the_page_is_up_to_date_and_names_all_options():
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "run: make docs"
    parts = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    sections = dict(parts)
    assert sections.keys() == REGISTRY.keys()
    for name, section in sections.items():
        assert len(formula(name)) > 5, name
        assert all(f"`{option}`" in section for option in options_of(name)), name
    assert "https://arxiv.org/abs/2108.12409" in sections["alibi"]
    assert "Learned numbers: 24." in sections["kerple_log"]
    assert "Learned numbers: 384." in sections["t5"]  # 32 buckets, 12 heads
    assert "`rpe`" in sections["t5"]
    assert "* `digits` (required): ids of the tokens" in sections["abacus"]


def test_every_picture_exists_and_none_is_left_over():
    shown = set(re.findall(r"\]\(positions/(\w+)\.svg\)", PAGE.read_text(encoding="utf-8")))
    assert shown == {name for name in REGISTRY if has_picture(name)}
    assert shown == {path.stem for path in (PAGE.parent / "positions").glob("*")}, "run: make docs"


def test_a_sentence_ends_outside_parentheses():
    assert first_sentence("-s · d; as a kernel, exp(-s · d).") == "-s · d"
    assert first_sentence("x (a. b) at 0.5\nand more. Then this.") == "x (a. b) at 0.5 and more"
    assert first_sentence(None) == ""
