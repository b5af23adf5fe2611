"""Pages of docs/results whose tables are the output of the commands above them."""

import glob
import re
import shlex
from collections import defaultdict

import pytest

from megatron.results.files import read_rows
from tests.support import ROOT
from tools import compare, show_results

COMMAND = re.compile(
    r"^    python tools/(compare|show_results)\.py ((?!.* -o ).+)\n[^#]*(?=\n## |\Z)", re.M
)


def rewritten(page, output, capsys):
    """The page with the output of each section's last command, up to the next section."""

    def with_output(match):
        tool, line = match.groups()
        words = [path for word in shlex.split(line) for path in sorted(glob.glob(word)) or [word]]
        if tool == "compare":
            output.unlink(missing_ok=True)
            assert compare.main([*words, "-o", str(output)]) == 0
            table = re.sub("<!--.*-->", "", output.read_text(encoding="utf-8"))
        else:
            capsys.readouterr()
            assert show_results.main(words) == 0
            table = capsys.readouterr().out
        return f"    python tools/{tool}.py {line}\n\n{table.strip()}\n"

    return COMMAND.sub(with_output, page.read_text(encoding="utf-8"))


def numbers_of_tables(page):
    """The numbers of each line of the page's tables: words around them may change."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [re.findall(r"[-+]?\d[\d.,]*", line) for line in lines]


@pytest.mark.parametrize(
    "name",
    [
        "abacus.md",
        "claims.md",
        "context.md",
        "documents.md",
        "growth.md",
        "pretrained.md",
        "recipe.md",
        "sinks.md",
    ],
)
def test_every_table_of_the_page_is_what_its_command_writes(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs/results" / name
    text = page.read_text(encoding="utf-8")
    assert len(COMMAND.findall(text)) >= text.count(" --claims ")
    assert COMMAND.search(text)
    again = rewritten(page, tmp_path / "claims.md", capsys)
    assert numbers_of_tables(again) == numbers_of_tables(text)


def test_the_table_of_steps_has_the_perplexities_of_its_rows():
    folder = ROOT / "docs/results"
    section = (folder / "pretrained.md").read_text(encoding="utf-8").split("\n## Another enc")[1]
    cells = defaultdict(dict)
    for row in read_rows([folder / "pretrained/training.jsonl"]):
        cells[row["step"]][row["cell"]["encoding"]] = f"{row['perplexity']:.4g}"
    encodings = list(cells[25])
    lines = [f"| step | {' | '.join(encodings)} |", "| ---: |" + " ---: |" * len(encodings)]
    for step, values in sorted(cells.items()):
        lines.append(f"| {step} | {' | '.join(values[name] for name in encodings)} |")
    assert "\n".join(lines) in section
