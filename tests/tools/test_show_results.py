"""Several runs in one table and one plot."""

from megatron.results.files import read_rows
from megatron.results.table import table
from tests.support import ROOT
from tools.show_results import main

RESULTS = ROOT / "docs" / "results"


def test_results_come_in_one_table_and_one_plot(tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    assert main([str(ROOT / "docs/demo.jsonl"), "-o", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[3:5]] == ["mep_free", "rotary"]
    assert "mep_free" in plot.read_text()
    words = [str(RESULTS / "cpu-environment.jsonl"), "--over-seeds", "-o", str(plot)]
    assert main(words) == 0
    assert "rotary: 101.9" in plot.read_text()
    assert "seed 123" not in plot.read_text()
    capsys.readouterr()
    assert main([str(RESULTS / "cpu-environment-protocols.jsonl"), "-o", str(plot)]) == 0


def test_the_tables_of_the_results_at_hand_are_those_of_their_files():
    pages = [RESULTS / "README.md", RESULTS / "natural_language.md"]
    page = [line for path in pages for line in path.read_text(encoding="utf-8").splitlines()]
    files = [*sorted(RESULTS.glob("cpu-*.jsonl")), *sorted(RESULTS.glob("language-*.jsonl"))]
    measured = [
        table(read_rows([path]), over_seeds=True, form="markdown").splitlines() for path in files
    ]
    lines = {line for table in measured for line in table if line.startswith("|")}
    environment = read_rows([RESULTS / "cpu-environment.jsonl"])
    in_bits = table(environment, over_seeds=True, bits_per_byte=True, form="markdown")
    lines |= {line for line in in_bits.splitlines() if line.startswith("|")}
    assert lines <= {*page}, lines - {*page}
    assert {line for line in page if line.startswith("| ") and " ± " in line} <= lines


def test_the_table_of_continued_training_has_the_numbers_of_its_file():
    """Its page calls the rows by their recipes, and adds the parent, which is in another file."""
    page = (RESULTS / "continued.md").read_text(encoding="utf-8").splitlines()
    shown = table(
        read_rows([RESULTS / "continued.jsonl"]), over_seeds=True, form="markdown"
    ).splitlines()
    measured, written = (sorted(map(numbers_of, filter(is_row, lines))) for lines in (shown, page))
    assert len(measured) == 5
    assert measured == written


def is_row(line):
    """Whether this is a row of a table with several seeds."""
    return line.startswith("|") and " ± " in line


def numbers_of(row):
    """The cells of a row but for the first."""
    return row.split("|")[2:]
