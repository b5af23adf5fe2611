"""docs/first_encoding.ipynb: its cells run, and its stored outputs are what its text says."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from megatron.results.files import read_results
from tests.support import ROOT, unlaunched

pytestmark = pytest.mark.docs

NOTEBOOK = json.loads((ROOT / "docs/first_encoding.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
RUN = """
import json, sys
names = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin), 1):
    exec(compile(source, f"<cell {number}>", "exec"), names)
"""
LENGTHS = [64, 256, 1024, 4096]
NAMES = ["rotary", "root"]


def check(text):
    """What a reader must find in the outputs, stored or of this run."""
    assert "0 fail: the encoding keeps what it must" in text
    [heading] = re.findall(r"^pos_emb +(.*)$", text, flags=re.MULTILINE)
    assert [int(word.strip("*")) for word in heading.split()] == LENGTHS
    lines = re.findall(rf"^({'|'.join(NAMES)}) +([\d. ]+)$", text, flags=re.MULTILINE)
    perplexities = {name: [float(word) for word in words.split()] for name, words in lines}
    assert [*perplexities] == NAMES
    for values in perplexities.values():
        assert all(1 < value < 200 for value in values), "trained models do not guess among 512"
    assert perplexities["rotary"][-1] > perplexities["rotary"][0], "as the text says"
    assert perplexities["root"][-1] < perplexities["rotary"][-1], "as the text says"


def test_all_cells_run_and_produce_what_the_text_describes(tmp_path):
    for script in ROOT.glob("*.py"):
        shutil.copy2(script, tmp_path)
    for name in ("megatron", "tools", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "docs").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(["".join(cell["source"]) for cell in CELLS]),
        cwd=tmp_path / "docs",
        env=unlaunched(tmp_path) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout)
    written = tmp_path / "runs" / "first_encoding"
    for name in NAMES:
        rows = read_results([written / name / "results.jsonl"])
        assert [row["length"] for row in rows] == LENGTHS
        assert {row["pos_emb"] for row in rows} == {name}
    assert (written / "perplexity.png").stat().st_size > 0


def test_the_stored_outputs_are_what_the_text_describes():
    printed = [
        line
        for cell in CELLS
        for output in cell["outputs"]
        if output["output_type"] == "stream"
        for line in output["text"]
    ]
    check("".join(printed))
    pictures = [output for cell in CELLS for output in cell["outputs"] if "data" in output]
    assert any("image/png" in output["data"] for output in pictures)
