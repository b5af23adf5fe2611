"""The tool that compares encodings: from results files to a table, Markdown and JSON."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megatron.results.files import write_lines
from tests.results.rows import row, seeds_of, texts
from tests.support import ROOT
from tools.compare import main


def test_a_reader_that_leaves_early_is_no_fault(tmp_path):
    write_lines(tmp_path / "a.jsonl", [row(name, texts()) for name in "ab"])
    words = [sys.executable, "tools/compare.py", tmp_path / "a.jsonl"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_tool_prints_a_table_for_each_length_and_writes_markdown_and_json(tmp_path, capsys):
    files = []
    for name, shifts in {"mep_free": [0.0, 0.0, 0.0], "rotary": [0.2, 0.21, 0.22]}.items():
        files.append(str(tmp_path / f"{name}.jsonl"))
        write_lines(
            tmp_path / f"{name}.jsonl",
            [*seeds_of(name, shifts), *seeds_of(name, shifts, length=1024)],
        )
    assert main([*files, "-o", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "length 512: stdlib valid" in shown
    assert "length 1024: stdlib valid" in shown
    assert shown.count("†") == 3  # two cells and the note
    cells = json.loads((tmp_path / "a.json").read_text())
    assert [(cell["length"], cell["mark"]) for cell in cells if cell["encoding"] == "rotary"] == [
        (512, "†"), (1024, "†"),
    ]  # fmt: skip
    assert cells[1]["ratio"] == pytest.approx(np.exp(0.21))
    assert cells[1]["by_seed"] == pytest.approx({"1": 0.2, "2": 0.21, "3": 0.22})
    assert main([*files, "-o", str(tmp_path / "a.md")]) == 0
    assert "| rotary | 3 | †" in (tmp_path / "a.md").read_text()
    assert main([*files, "-o", str(tmp_path / "a.txt")]) == 1
    assert "a.txt is neither .md nor .json - name it so" in capsys.readouterr().err


def test_files_of_probes_are_named_and_left_out(capsys, tmp_path):
    probes = tmp_path / "probes.jsonl"
    probes.write_text('{"probe": "copy"}\n')
    assert main([str(probes), str(ROOT / "docs/results/language-arxiv.jsonl")]) == 0
    assert capsys.readouterr().err == f"note: {probes} holds probes, left out\n"
    assert main([str(probes)]) == 1
    assert "every file holds probes - give files of evaluate.py" in capsys.readouterr().err
