"""Several runs in one table and one plot."""

import json
import math

from megatron.results.files import read_results
from megatron.results.table import table
from tests.support import ROOT

RESULTS = ROOT / "docs" / "results"


def test_results_of_several_files_come_in_one_table_and_one_plot(forks, tmp_path):
    demo = ROOT / "docs" / "demo.jsonl"
    lines = demo.read_text().splitlines(keepends=True)
    for name in ("mep_free", "rotary"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(line for line in lines if f'"{name}"' in line)
        )
    plot = tmp_path / "plot.svg"
    done = forks.run(
        "tools/show_results.py", tmp_path / "mep_free.jsonl", tmp_path / "rotary.jsonl", "-o", plot
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["mep_free", "rotary"]
    assert "mep_free" in plot.read_text()


def test_a_file_that_holds_something_else_is_one_message(forks, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    done = forks.run("tools/show_results.py", tmp_path / "a.jsonl")
    assert done.returncode == 1
    assert "is no result of evaluate.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_seeds_of_an_encoding_are_one_line_and_texts_a_table_each(forks, tmp_path):
    shared = {
        "windows": 1,
        "tokens": 512,
        "step": 9,
        "train_length": 512,
        "part": "valid",
        "protocol": "tail",
    }
    measured = [
        ("alibi", 1, 512, 10.0, "a"),
        ("alibi", 2, 512, 12.0, "a"),
        ("alibi", 1, 1024, 9.0, "a"),
        ("learned", 1, 512, 11.0, "a"),
        ("learned", 1, 1024, None, "a"),
        ("alibi", 1, 512, 70.0, "b"),
    ]
    rows = []
    for name, seed, length, value, corpus in measured:
        model = {"pos_emb": name, "seed": seed, "config_hash": f"{name}{seed}"}
        numbers = {"loss": value and math.log(value), "perplexity": value}
        rows.append(shared | model | numbers | {"length": length, "corpus": corpus})
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row | {"reason": "it ends"}) + "\n" for row in rows)
    )
    shown = forks.run("tools/show_results.py", tmp_path / "a.jsonl", "--over-seeds", "--markdown")
    assert shown.returncode == 0, shown.stderr
    assert [line for line in shown.stdout.splitlines() if line.startswith("|")] == [
        "| pos_emb | seeds | 512\\* | 1024 |",
        "| --- | ---: | ---: | ---: |",
        "| alibi | 2 | 11.00 ± 1.41 | 9.00 |",
        "| learned | 1 | 11.00 | n/a |",
        "| pos_emb | seeds | 512\\* |",
        "| --- | ---: | ---: |",
        "| alibi | 1 | 70.00 |",
    ]
    assert "learned: n/a at 1024: it ends" in shown.stdout


def test_the_tables_of_the_results_at_hand_are_those_of_their_files():
    pages = [RESULTS / "README.md", RESULTS / "natural_language.md"]
    page = [line for path in pages for line in path.read_text(encoding="utf-8").splitlines()]
    files = [*sorted(RESULTS.glob("cpu-*.jsonl")), *sorted(RESULTS.glob("language-*.jsonl"))]
    measured = [
        table(read_results([path]), over_seeds=True, markdown=True).splitlines() for path in files
    ]
    lines = {line for table in measured for line in table if line.startswith("|")}
    environment = read_results([RESULTS / "cpu-environment.jsonl"])
    in_bits = table(environment, over_seeds=True, bits_per_byte=True, markdown=True)
    lines |= {line for line in in_bits.splitlines() if line.startswith("|")}
    assert lines <= {*page}, lines - {*page}
    assert {line for line in page if line.startswith("| ") and " ± " in line} <= lines


def test_the_table_of_continued_training_has_the_numbers_of_its_file():
    """Its page calls the rows by their recipes, and adds the parent, which is in another file."""
    page = (RESULTS / "continued.md").read_text(encoding="utf-8").splitlines()
    shown = table(
        read_results([RESULTS / "continued.jsonl"]), over_seeds=True, markdown=True
    ).splitlines()
    measured, written = (sorted(map(numbers_of, filter(is_row, lines))) for lines in (shown, page))
    assert len(measured) == 5
    assert measured == written


def is_row(line: str) -> bool:
    """Whether this is a row of a table with several seeds."""
    return line.startswith("|") and " ± " in line


def numbers_of(row: str) -> list[str]:
    """The cells of a row but for the first."""
    return row.split("|")[2:]


def test_the_table_of_the_demo_is_that_of_its_file():
    experiments = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert table(read_results([ROOT / "docs" / "demo.jsonl"]), markdown=True) in experiments
