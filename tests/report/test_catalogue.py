"""docs/positions.md and the pages of families are what the registry says, with every picture."""

import inspect
import re

from megatron.positions import REGISTRY, options_of
from megatron.report.catalogue import (
    FAMILIES,
    FOLDER,
    MEANING,
    PAGE,
    drawn,
    family_page,
    page,
)
from tests.support import ROOT


def test_the_pages_are_up_to_date_and_name_all_options():
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "run: make docs"
    sections = {}
    for family in FAMILIES:
        details = family_page(family)
        assert (FOLDER / f"{family}.md").read_text(encoding="utf-8") == details, "run: make docs"
        parts = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", details, flags=re.DOTALL | re.MULTILINE)
        for name, section in parts:
            sections[name] = section
            assert f"(positions/{family}.md#{name})" in text
    assert sections.keys() == REGISTRY.keys(), "add its file to FAMILIES of report/catalogue.py"
    for name, section in sections.items():
        assert all(f"\n| `{option}` | " in section for option in options_of(name)), name
    assert "https://arxiv.org/abs/2108.12409" in text
    assert "24 learned numbers" in sections["kerple_log"]
    assert "384 learned numbers" in sections["t5"]  # 32 buckets, 12 heads
    assert "also called `rpe`" in sections["t5"]
    assert "| `digits` | required | ids of the tokens" in sections["abacus"]
    assert "| `slope_factor` | 1.0 | multiplies every slope |" in sections["gaussian"]


def test_only_lines_about_options_leave_a_docstring():
    """A line of text that begins with `word:` would be taken for one, and not be shown."""
    for name, encoding in REGISTRY.items():
        found = MEANING.findall(inspect.cleandoc(encoding.__doc__ or ""))
        words = {word for words, _ in found for word in words.split(", ")}
        assert words <= options_of(name).keys(), name


def test_a_row_names_the_file_that_defines_the_encoding():
    rows = re.findall(r"^\| \[(\w+)\].* \| `(\w+\.py)` \|$", page(), flags=re.MULTILINE)
    files = dict(rows)
    assert files.keys() == REGISTRY.keys()
    for name, file in files.items():
        code = (ROOT / "megatron/positions" / file).read_text(encoding="utf-8")
        assert f'@register("{name}"' in code


def test_every_picture_exists_and_none_is_left_over():
    pages = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md"))
    shown = set(re.findall(r"\]\((\w+)\.svg\)", pages))
    assert shown == {name for name in REGISTRY if drawn(name, 512)}
    assert shown == {path.stem for path in FOLDER.glob("*.svg")}, "run: make docs"
