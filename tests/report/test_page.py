"""The page of results: every number in its place, no links and no markup of a row."""

import re
from html import unescape

import pytest

from megatron.errors import UserError
from megatron.report.page import page_of, write_page
from megatron.results.files import read_rows, write_results
from megatron.results.labels import kinds
from tests.results.rows import answers, row, rows, seeds_of
from tests.support import ROOT
from tools.show_results import main

MEASURED = [
    *rows("alibi", {512: 10.0, 1024: 9.0}, seed=1, checkpoint="runs/a/global_step2000"),
    *rows("alibi", {512: 12.0, 1024: 9.5}, seed=2, checkpoint="runs/b/global_step2000"),
    *rows("mep", {512: 11.25, 1024: 345678.0}, pos_emb_args={"kernels": ["exp", "<b>&"]}),
    *rows("learned", {512: 13.5}),
    *rows("learned", {1024: None}, reason="learned positions end at 512"),
]


@pytest.fixture
def shown(tmp_path):
    """A function: the HTML of rows."""

    def html(measured, **options):
        write_page(page_of(measured, **options), tmp_path / "page.html")
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return html


def tables_of(page):
    """The texts of the cells of every table."""
    tables = []
    for table in re.findall(r"<table>(.*?)</table>", page, flags=re.DOTALL):
        lines = re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line) for line in lines]
        tables.append([[unescape(re.sub("<.*?>", "", cell)) for cell in line] for line in cells])
    return tables


def test_the_page_takes_nothing_from_elsewhere_and_no_text_of_a_row_is_markup(shown):
    evil = '<script>alert("x")</script><b>&\'"'
    keys = ("pos_emb", "corpus", "part", "protocol", "checkpoint", "device", "commit", "reason")
    hostile = dict.fromkeys(keys, evil) | {"pos_emb_args": {"kernels": [evil]}}
    measured = [row | hostile | {"perplexity": None, "loss": None} for row in MEASURED[:2]]
    page = shown([*measured, *MEASURED])
    references = re.findall(r'(?:href="|src="|url\()([^")]+)', page)
    links = {text.removeprefix("#") for text in references if not text.startswith("data:")}
    assert links == {*re.findall(r' id="([^"]+)"', page)}
    assert "<script" not in page
    assert "<b>" not in page


def test_the_table_has_means_over_seeds_and_the_reason_for_what_is_missing(shown):
    page = shown(MEASURED)
    table, *_, models = tables_of(page)
    lines = {line[0]: line[1:] for line in table}
    assert table[0] == ["pos_emb", "seeds", "512*", "1024"]
    assert lines["alibi"] == ["2", "11.00 ± 1.41", "9.25 ± 0.35"]
    assert lines["mep"] == ["1", "11.25", "3.5e+05"]
    assert lines["learned"] == ["1", "13.50", "n/a"]
    assert "learned: n/a at 1024: learned positions end at 512" in page
    assert models[0][:2] == ["checkpoint", "encoding"]
    assert any("kernels [exp, <b>&]" in line for line in models)


def test_each_text_has_a_section_with_its_own_reference():
    measured = [
        *seeds_of("a", [0.0]),
        *seeds_of("a", [0.3], text="b"),
        *seeds_of("b", [0.1]),
        *seeds_of("b", [0.2], text="b"),
        *rows("b", {512: 30.0}, protocol="tail", tail=512),
    ]
    for against, shown in ((None, ["a", "a"]), ("b", ["b", "b"])):
        *sections, _ = page_of(measured, against)
        headings = [table.head for section in sections for table in section.comparisons]
        references = [word for head in headings for word in head if word.startswith("loss - ")]
        assert references == [f"loss - {label}" for label in shown]
    assert [section.heading for section in sections] == [
        "stdlib valid: the same tokens at every length, text ab12",
        "stdlib valid: the same tokens at every length, text b",
        "stdlib valid: the last tokens of each window",
    ]


def test_encodings_are_compared_on_the_same_text_or_the_page_says_why_not():
    shifted = seeds_of("a", [0.0, 0.0, 0.0]) + seeds_of("b", [0.2, 0.21, 0.22])
    section, _ = page_of([*shifted, *seeds_of("c", [0.1])], against="a")
    (table,) = section.comparisons
    differences = [line[table.head.index("loss - a")] for line in table.body]
    assert differences == ["", "+0.2100", "+0.1000"]
    apart, _ = page_of(rows("alibi", {512: 10.0}) + rows("mep", {512: 10.0}))
    (note,) = apart.notes
    assert "nothing can be compared with alibi:" in note


def test_tasks_have_curves_and_tables():
    tasks = answers("rotary", {512: (1.0, 1.0), 1024: (0.5, 0.0)}, seed=1)
    tasks += answers("rotary", {512: (1.0, 1.0), 1024: (0.4, 0.0)}, seed=2)
    tasks += answers("learned", {512: 0.97, 1024: None}, reason="it ends")
    text, task, _ = page_of([*MEASURED[:2], *tasks])
    assert [len(text.figures), len(task.figures)] == [1, 1]
    tokens, whole = task.tables
    assert tokens.body == [
        ["rotary", "2", "100.0 ± 0.0", "45.0 ± 7.1"],
        ["learned", "1", "97.0", "n/a"],
    ]
    assert whole.body[0] == ["rotary", "2", "100.0 ± 0.0", "0.0 ± 0.0"]


def test_a_summary_says_who_is_best_who_gains_and_how_sure_that_is(shown):
    measured = []
    for seed, shift in enumerate([0.0, 0.01, 0.02], 1):
        for length in (512, 2048):
            facts = {"seed": seed, "length": length, "train_length": 512, "protocol": "tail"}
            measured += [row("alibi", [3.0 + shift] * 30, **facts)]
            measured += [row("alibi", [3.1 + shift] * 30, window="train_length", **facts)]
            measured += [row("rotary", [4.0 + 2 * shift] * 30, **facts)]
            measured += [row("rotary", [3.2 + shift] * 30, window="train_length", **facts)]
    page = shown(measured)
    top, _, _ = page.partition("<h2>")
    best, gains, sure = (
        " ".join(line.split()) for line in re.findall(r"<li>(.*?)</li>", top, flags=re.DOTALL)
    )
    assert best.startswith("Best at 2048 tokens, perplexity: alibi (20.29); alibi, window 512 (")
    assert gains.endswith(
        "(95 % interval below 0): alibi 2048 or more; rotary none shown above 512."
    )
    different = "alibi, window 512; rotary; rotary, window 512."
    assert sure == f"Different from alibi there over seeds: {different}"
    open_tables, _, closed = page.partition("<details>")
    assert "length 2048:" in open_tables
    assert "length 512:" not in open_tables
    assert "length 512:" in closed


def test_the_page_of_the_results_at_hand_compares_as_compare_does():
    published = read_rows(sorted((ROOT / "docs/results").glob("cpu-*.jsonl")))
    names = {row["pos_emb"] for row in published}
    windowed = {f"{name}{window}" for name in names for window in ("", ", window 512")}
    assert {*kinds(published)} == windowed
    for section in page_of(published)[:-1]:
        labels = {line[0] for line in section.tables[0].body}
        assert labels == (windowed if "every length" in section.heading else names)
    with pytest.raises(UserError, match=r"--against: .window 512. means several"):
        page_of(published, against="window 512")


def test_the_command_writes_a_page_with_other_names_for_chosen_labels(tmp_path, capsys):
    write_results(tmp_path / "a.jsonl", MEASURED)
    words = [str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "page.html")]
    assert main([*words, "--only", "learned", "alibi", "--names", "alibi=ALiBi"]) == 0
    assert capsys.readouterr().out.endswith("page.html: 6 rows\n")
    table, *_ = tables_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [line[0] for line in table] == ["pos_emb", "learned", "ALiBi"]
