"""Pages of docs/results whose tables are output of the commands above them."""

import glob
import re
import shlex
from collections import defaultdict
from statistics import mean

import pytest

from megatron.results.files import read_rows
from tests.support import ROOT
from tools import compare, show_results

FOLDER = ROOT / "docs/results"
COMMAND = re.compile(r"^    python tools/(compare|show_results)\.py ((?!.* -o ).+)$", re.M)
END = re.compile(r"^(#|    python )", re.M)


def output_of(tool, line, folder, capsys):
    """The Markdown that a command of a page writes."""
    words = [path for word in shlex.split(line) for path in sorted(glob.glob(word)) or [word]]
    capsys.readouterr()
    if tool == "show_results":
        assert show_results.main(words) == 0
        return capsys.readouterr().out
    output = folder / "output.md"
    output.unlink(missing_ok=True)
    assert compare.main([*words, "-o", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def tables_of(markdown):
    """The tables of a page, each a list of lines of cells; the first has the headings."""
    tables, above = [], ""
    for line in markdown.splitlines():
        if line.startswith("|"):
            if not above.startswith("|"):
                tables.append([])
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not set("".join(cells)) <= {"-", ":", " "}:
                tables[-1].append(cells)
        above = line
    return tables


def is_in(shown, whole):
    """Whether a table's lines and columns are some of another's, in its order.

    The first column has the beginning of the line's label, or words with which no label begins.
    """
    (_, *columns), *lines = shown
    head, *rest = whole
    if not set(columns) <= set(head):
        return False
    places = [head.index(column) for column in columns]
    candidates = iter(rest)
    for label, *cells in lines:
        is_label = any(line[0].startswith(label) for line in rest)
        for line in candidates:
            fits = line[0].startswith(label) or not is_label
            if fits and [line[place] for place in places] == cells:
                break
        else:
            return False
    return True


@pytest.mark.parametrize(
    "name",
    [
        "abacus",
        "claims",
        "context",
        "continued",
        "documents",
        "eight_encodings",
        "growth",
        "natural_language",
        "order",
        "pretrained",
        "recipe",
        "sinks",
        "tasks",
    ],
)
def test_every_table_of_the_page_is_in_what_its_command_writes(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    commands = list(COMMAND.finditer(page))
    assert commands
    for command in commands:
        below = END.split(page[command.end() :])[0]
        outputs = iter(tables_of(output_of(*command.groups(), tmp_path, capsys)))
        tables = tables_of(below)
        assert tables, command.group()
        for table in tables:
            assert any(is_in(table, output) for output in outputs), (command.group(), table)


def test_the_table_of_steps_has_the_perplexities_of_its_rows():
    section = (FOLDER / "pretrained.md").read_text(encoding="utf-8").split("\n## Another enc")[1]
    cells = defaultdict(dict)
    for row in read_rows([FOLDER / "pretrained/training.jsonl"]):
        cells[str(row["step"])][row["cell"]["encoding"]] = f"{row['perplexity']:.4g}"
    head, *lines = tables_of(section)[0]
    assert len(lines) == 3
    for step, *values in lines:
        assert values == [cells[step][name] for name in head[1:]]


def test_the_ranges_over_recipes_are_those_of_the_rows():
    page = (FOLDER / "recipe.md").read_text(encoding="utf-8")
    files = {
        "flip_flop": ("token_accuracy", 1024, 100),
        "recall": ("token_accuracy", 256, 100),
        "code": ("perplexity", 2048, 1),
    }
    values = defaultdict(lambda: defaultdict(list))
    for name, (quantity, length, scale) in files.items():
        for row in read_rows([FOLDER / f"recipe/{name}.jsonl"]):
            if row["length"] == length:
                cell = row["cell"]
                recipe = f"{cell['optimizer']} {cell['schedule']} {cell['gate']}"
                values[name, cell["encoding"]][recipe].append(scale * row[quantity])
    columns = [
        ("flip_flop", ""),
        ("recall", "adamw .* plain"),
        ("recall", "adamw .* gated"),
        ("recall", "muon"),
        ("code", ""),
    ]
    _, *lines = tables_of(page)[0]
    assert [line[0] for line in lines] == ["none", "rotary", "alibi", "kerple_log", "fox"]
    for encoding, *cells in lines:
        for cell, (name, pattern) in zip(cells, columns, strict=True):
            recipes = values[name, encoding].items()
            means = [mean(seeds) for recipe, seeds in recipes if re.match(pattern, recipe)]
            assert cell == f"{min(means):.1f} to {max(means):.1f}"
