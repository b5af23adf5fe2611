"""The tool that compares encodings: from results files to a table, Markdown and JSON."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.results.rows import row, seeds_of, texts
from tests.support import ROOT
from tools.compare import main


def write(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_a_reader_that_leaves_early_is_no_fault(tmp_path):
    file = write(tmp_path / "a.jsonl", [row(name, texts()) for name in "ab"])
    words = [sys.executable, "tools/compare.py", file]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_tool_prints_a_table_for_each_length_and_writes_markdown_and_json(forks, tmp_path):
    differences = {"mep_free": [0.0, 0.0, 0.0], "rotary": [0.2, 0.21, 0.22]}
    files = []
    for name, shifts in differences.items():
        rows = [*seeds_of(name, shifts), *seeds_of(name, shifts, length=1024)]
        files.append(write(tmp_path / f"{name}.jsonl", rows))
    done = forks.run("tools/compare.py", *files, "-o", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert "length 512: stdlib valid" in done.stdout
    assert "length 1024: stdlib valid" in done.stdout
    assert "Holm's correction for 2 comparisons" in done.stdout
    assert done.stdout.count("†") == 3  # two cells and the note
    assert "few windows" not in done.stdout
    cells = json.loads((tmp_path / "a.json").read_text())
    assert [(cell["encoding"], cell["length"], cell["mark"]) for cell in cells] == [
        ("mep_free", 512, ""),
        ("rotary", 512, "†"),
        ("mep_free", 1024, ""),
        ("rotary", 1024, "†"),
    ]
    claim = cells[1]
    low, high = claim["ratio_interval"]
    assert low < np.exp(0.21) < high
    assert claim["ratio"] == pytest.approx(np.exp(claim["difference"]))
    assert (claim["unit"], claim["interval_is_about"]) == ("seeds", "over seeds")
    assert claim["by_seed"] == pytest.approx({"1": 0.2, "2": 0.21, "3": 0.22})
    assert forks.run("tools/compare.py", *files, "-o", tmp_path / "a.md").returncode == 0
    assert "| rotary | 3 | †" in (tmp_path / "a.md").read_text()
    wrong = forks.run("tools/compare.py", *files, "-o", tmp_path / "a.txt")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        f"--output: {tmp_path}/a.txt is neither .md nor .json - name it so\n",
    )


def test_two_seeds_that_disagree_in_sign_have_no_mark_in_any_output(forks, tmp_path):
    rows = [*seeds_of("alibi", [0.0, 0.0]), *seeds_of("rotary", [0.03, -0.09], noise=0.01)]
    file = write(tmp_path / "a.jsonl", rows)
    done = forks.run("tools/compare.py", file, "-o", tmp_path / "a.json")
    markdown = forks.run("tools/compare.py", file, "-o", tmp_path / "a.md")
    assert (done.returncode, markdown.returncode) == (0, 0)
    cell = json.loads((tmp_path / "a.json").read_text())[1]
    assert (cell["mark"], cell["p"], cell["seeds_disagree"]) == ("", None, True)
    assert (cell["unit"], cell["text_unit"]) == ("windows", "windows")
    assert cell["interval_is_about"] == "these weights on this text"
    for text in (done.stdout, (tmp_path / "a.md").read_text()):
        assert "these weights on this text" in text
        assert "seeds disagree in sign" in text
        assert not {"†", "‡"} & set(text)


def test_files_of_probes_are_named_and_left_out(capsys, tmp_path):
    probes = tmp_path / "probes.jsonl"
    probes.write_text('{"probe": "copy"}\n')
    results = str(ROOT / "docs/results/language-arxiv.jsonl")
    assert main([results]) == 0
    alone = capsys.readouterr().out
    assert main([str(probes), results]) == 0
    shown = capsys.readouterr()
    assert shown.out == alone
    assert shown.err == f"note: {probes} holds probes, left out\n"
    assert main([str(probes)]) == 1
    message = "compare.py: every file holds probes - give files of evaluate.py\n"
    assert capsys.readouterr().err == message
