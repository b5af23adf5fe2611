"""docs/first_encoding.ipynb: its cells run, and its stored outputs are what its text says."""

import contextlib
import io
import json
import re
import sys

import pytest

from megatron.report.document import make_clone
from megatron.results.files import read_rows
from tests.support import ROOT

pytestmark = pytest.mark.docs

NOTEBOOK = json.loads((ROOT / "docs/first_encoding.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
NAMES = ["rotary", "root"]


def check(text):
    """What a reader must find in the outputs, stored or of this run."""
    assert "0 fail: the encoding has all properties that it must have" in text
    lines = re.findall(rf"^({'|'.join(NAMES)}) +([\d. ]+)$", text, flags=re.MULTILINE)
    perplexities = {name: [float(word) for word in words.split()] for name, words in lines}
    assert [*perplexities] == NAMES
    assert perplexities["rotary"][-1] > perplexities["rotary"][0], "as the text says"
    assert perplexities["root"][-1] < perplexities["rotary"][-1], "as the text says"


def test_the_stored_outputs_are_what_the_text_describes():
    printed = ""
    for cell in CELLS:
        for output in cell["outputs"]:
            printed += "".join(output.get("text", []))
    check(printed)


def test_all_cells_run_and_produce_what_the_text_describes(tmp_path, monkeypatch, own_registry):
    make_clone(tmp_path)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in CELLS:
            exec("".join(cell["source"]), names)
    check(printed.getvalue())
    for name in NAMES:
        rows = read_rows([tmp_path / "runs/first_encoding" / name / "results.jsonl"])
        assert {row["pos_emb"] for row in rows} == {name}
