"""The tool that compares encodings: from results files to a table, Markdown and JSON."""

import subprocess
import sys

from megatron.results.files import write_lines
from tests.results.rows import row, seeds_of, texts
from tests.support import ROOT
from tools.compare import main


def test_a_reader_that_leaves_early_is_no_fault(tmp_path):
    write_lines(tmp_path / "a.jsonl", [row(name, texts()) for name in "ab"])
    words = [sys.executable, "tools/compare.py", tmp_path / "a.jsonl"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_tool_prints_a_table_for_each_length_and_writes_markdown(tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    rows = []
    for name, shifts in {"mep_free": [0.0, 0.0, 0.0], "rotary": [0.2, 0.21, 0.22]}.items():
        rows += [*seeds_of(name, shifts), *seeds_of(name, shifts, length=1024, tokens=65536)]
    write_lines(results, rows)
    output = tmp_path / "a.md"
    assert main([str(results), "-o", str(output)]) == 0
    assert output.read_text().count("| rotary | 3 | †") == 2
    printed = capsys.readouterr()
    assert "length 512: stdlib valid" in printed.out
    assert "length 1024: stdlib valid" in printed.out
    assert main([str(results), "-o", str(tmp_path / "a.txt")]) == 1
    assert "a.txt is no .md" in capsys.readouterr().err
