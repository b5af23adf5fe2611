"""The page of results, read by a parser: every number in its place, gaps named, no links."""

import itertools
import re
from html import unescape

import pytest

from megatron.errors import UserError
from megatron.positions import FILES, REGISTRY
from megatron.report.page import NOT_FOUND, model_beside, page_of_rows, reference_of
from megatron.results.comparison import compared
from megatron.results.files import read_rows
from megatron.results.labels import kinds
from tests.checkpoints import checkpoint_of_bytes
from tests.results.rows import answers, rows, seeds_of
from tests.support import ROOT

MEASURED = [
    *rows("alibi", {512: 10.0, 1024: 9.0}, seed=1, checkpoint="runs/a/global_step2000"),
    *rows("alibi", {512: 12.0, 1024: 9.5}, seed=2, checkpoint="runs/b/global_step2000"),
    *rows("mep", {512: 11.25, 1024: 345678.0}, pos_emb_args={"kernels": ["exp", "<b>&"]}),
    *rows("learned", {512: 13.5}),
    *rows("learned", {1024: None}, reason="learned positions end at 512"),
]


@pytest.fixture(scope="module")
def page():
    return page_of_rows(MEASURED).html("Results <of> mine")


def tables_of(page):
    """The texts of the cells of every table."""
    tables = []
    for table in re.findall(r"<table>(.*?)</table>", page, flags=re.DOTALL):
        lines = re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line) for line in lines]
        tables.append([[unescape(re.sub("<.*?>", "", cell)) for cell in line] for line in cells])
    return tables


def test_the_page_takes_nothing_from_elsewhere(page):
    references = re.findall(r'(?:href="|src="|url\()([^")]+)', page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert references
    assert {reference.removeprefix("#") for reference in references} <= {*ids}
    assert len(ids) == len({*ids})
    assert "@import" not in page


def test_no_text_of_a_row_is_markup():
    evil = '<script>alert("x")</script><b>&\'"'
    keys = ("pos_emb", "corpus", "part", "protocol", "checkpoint", "device", "commit", "reason")
    hostile = dict.fromkeys(keys, evil) | {"pos_emb_args": {"kernels": [evil]}}
    measured = [row | hostile | {"perplexity": None, "loss": None} for row in MEASURED[:2]]
    page = page_of_rows([*measured, *MEASURED]).html(evil)
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert page.count("<script") == 1


def test_the_table_has_means_over_seeds_and_what_is_missing_is_named_once_for_each_cause(page):
    table = tables_of(page)[0]
    lines = {line[0]: line[1:] for line in table}
    assert table[0] == ["pos_emb", "seeds", "512*", "1024"]
    assert lines["alibi"] == ["2", "11.00 ± 1.41", "9.25 ± 0.35"]
    assert lines["mep"] == ["1", "11.25", "3.5e+05"]
    assert lines["learned"] == ["1", "13.50", "n/a"]
    missing = page[page.index("<h2>What is missing") :]
    assert "stdlib valid: equal_tokens, learned at 1024: learned positions end at 512" in missing
    assert f"2 times: runs/a/global_step2000; runs/b/global_step2000: {NOT_FOUND}" in missing
    models = next(table for table in tables_of(page) if table[0][0] == "checkpoint")
    assert any("kernels [exp, <b>&]" in line for line in models)


def test_each_text_has_a_section_with_its_own_reference_in_whatever_order_files_are():
    files = [
        [*seeds_of("a", [0.0]), *seeds_of("a", [0.3], text="b")],
        [*seeds_of("b", [0.1]), *seeds_of("b", [0.2], text="b")],
        seeds_of("a", [0.2], window=508, sinks=4),
        rows("b", {512: 30.0}, protocol="tail", tail=512),
    ]
    for in_order in itertools.permutations(files):
        sections = page_of_rows([*itertools.chain(*in_order)]).sections
        differences = {}
        for section in sections:
            table = section.compared[0] if section.compared else section.tables[0]
            differences[section.heading] = sorted((line[0], *line[3:4]) for line in table.body)
        assert differences == {
            "stdlib valid: equal_tokens, text ab12": [
                ("a", ""),
                ("a, window 508, sinks 4", "+0.2000"),
                ("b", "+0.1000"),
            ],
            "stdlib valid: equal_tokens, text b": [("a", "+0.1000"), ("b", "")],
            "stdlib valid: tail": [("b",)],
        }


def test_a_pass_by_position_is_shown_at_the_shorter_lengths_that_it_holds():
    edges, losses = [0, 512, 1024, 1500, 2048], [3.0, 2.0, 1.0, 2.0]
    measured = {"protocol": "position", "position_edges": edges, "position_losses": losses}
    page = page_of_rows(rows("mep", {2048: 7.389}, windows=1, **measured))
    table = tables_of(page.html("t"))[0]
    assert table[0] == ["pos_emb", "seeds", "512*", "1024", "2048"]
    assert table[1][2:4] == ["20.09", "12.18"]  # exp(3) and exp(2.5)


def test_encodings_are_compared_on_the_same_text_or_the_page_says_why_not():
    shifted = seeds_of("a", [0.0, 0.0, 0.0]) + seeds_of("b", [0.2, 0.21, 0.22])
    page = page_of_rows([*shifted, *seeds_of("c", [0.1])], against="a").html("t")
    (table,) = [table for table in tables_of(page) if table[0][0] == "encoding"]
    differences = [line[table[0].index("loss - a")] for line in table]
    assert differences == ["loss - a", "", "+0.2100", "+0.1000"]
    assert "two-sided" in page
    longer = [*seeds_of("a", [0.0], length=1024), *seeds_of("b", [0.1], length=1024)]
    for in_order in ([*longer, *shifted], [*shifted, *longer]):
        page = page_of_rows(in_order).html("t")
        assert re.findall(r"<details open><summary>length (\d+)", page) == ["1024"]
    apart = page_of_rows(rows("alibi", {512: 10.0}) + rows("mep", {512: 10.0})).html("t")
    assert "nothing can be compared with alibi:" in apart


def test_tasks_come_first_as_heatmaps_that_are_spoken_and_have_tables():
    tasks = answers("rotary", {512: (1.0, 1.0), 1024: (0.5, 0.0)}, seed=1)
    tasks += answers("rotary", {512: (1.0, 1.0), 1024: (0.4, 0.0)}, seed=2)
    tasks += answers("learned", {512: 0.97, 1024: None}, reason="it ends")
    page = page_of_rows([*MEASURED[:2], *tasks])
    shown = page.html("t")
    assert 'aria-label="copy; rotary: 100±0 at 512, 45±7 at 1024; learned: 97 at' in shown
    headings = re.findall("<h2>(.*?)</h2>", shown)
    assert headings[:3] == ["Tasks", "stdlib valid: equal_tokens", "task:copy"]
    assert [*page.figures] == ["perplexity", "2-accuracy"]
    _, tokens, whole, _ = tables_of(shown)
    assert tokens[1:] == [
        ["rotary", "2", "100.0 ± 0.0", "45.0 ± 7.1"],
        ["learned", "1", "97.0", "n/a"],
    ]
    assert whole[1] == ["rotary", "2", "100.0 ± 0.0", "0.0 ± 0.0"]
    assert ("task:copy, learned at 1024", "it ends") in page.gaps
    assert "of the largest size that fits" in shown


def test_the_text_of_a_section_is_coloured_by_what_far_context_gains():
    losses = {64: [3.0, 3.0, 3.0, 3.0], 512: [1.5, 2.8, 3.0, 4.5]}
    facts = {"protocol": "tail", "tail": 2, "tokens": 4, "windows": 2, "text": "ab"}
    facts["token_texts"] = ["x", " <b>", "␊", "y"]
    measured = []
    for length, token_losses in losses.items():
        measured += rows("mep", {length: 10.0}, token_losses=token_losses, **facts)
    page = page_of_rows(measured)
    shown = page.html("t")
    assert '<span class="gain2" title="+1.50">x</span>' in shown
    assert '<span class="gain1" title="+0.20"> &lt;b&gt;</span></p>' in shown  # ends its window
    assert '<span class="lose0" title="+0.00">↵\n</span>' in shown
    assert '<span class="lose2" title="-1.50">y</span></p>' in shown
    table = next(table for table in tables_of(shown) if "mean gain" in table[0])
    assert table[1][:3] == ["mep", "64 to 512", "4"]
    gain, lose = page.figures["gain"].axes
    assert dict(zip(*gain.lines[0].get_data(), strict=True))[1.0] == 25  # percent gain more than 1
    assert max(gain.lines[0].get_xdata()) < 1.5 <= max(lose.lines[0].get_xdata()) * 2**0.5


def test_the_page_says_nothing_of_seeds_and_hatches_where_there_are_none():
    one_seed = [*rows("alibi", {512: 10.0, 1024: 9.0}), *answers("alibi", {512: 1.0})]
    several = rows("alibi", {512: 11.0, 1024: 9.5}, seed=2) + answers("alibi", {512: 0.5}, seed=2)
    shown = page_of_rows(one_seed).html("t")
    assert "over seeds" not in shown
    assert "hatched" not in shown
    shown = page_of_rows([*one_seed, *several, *answers("mep", {1024: 0.5})]).html("t")
    assert "Each curve is a mean over seeds" in shown
    assert "mean ± standard deviation over seeds; hatched: not measured" in shown


def test_curves_that_stay_low_are_drawn_once_more():
    page = page_of_rows([*MEASURED, *rows("rotary", {512: 11.0, 1024: 10.0})])
    near = page.figures["perplexity-near"].axes[0]
    *_, last = near.get_legend().get_texts()
    assert last.get_text() == "too far above to be drawn: mep"
    labels = {line.get_label().split(":")[0] for line in near.lines}
    assert {"alibi", "rotary"} <= labels
    assert "mep" not in labels


def test_the_page_of_the_results_at_hand_compares_as_compare_does():
    published = read_rows(sorted((ROOT / "docs/results").glob("cpu-*.jsonl")))
    names = {row["pos_emb"] for row in published}
    windowed = {f"{name}{window}" for name in names for window in ("", ", window 512")}
    assert {*kinds(published)} == windowed
    for section in page_of_rows(published).sections:
        labels = {line[0] for line in section.tables[0].body}
        assert labels == (windowed if section.protocol == "equal_tokens" else names)
    tail = kinds([row for row in published if row["protocol"] == "tail"])
    lowest = reference_of(tail, None)
    for against, label, in_section in (
        ("mep_free, window none", "mep_free", "mep_free"),
        ("alibi, protocol tail", "alibi", "alibi"),
        # The protocol `tail` has no windows: the page takes the lowest there.
        ("t5, window train_length", "t5, window 512", lowest),
    ):
        assert compared(kinds(published), against)[0].reference == label
        assert reference_of(tail, against) == in_section
    with pytest.raises(UserError, match="--against: 'window 512' means several"):
        page_of_rows(published, against="window 512")
    equal = kinds([row for row in published if row["protocol"] == "equal_tokens"])
    assert reference_of(equal, None) == "mep_free", "the lowest with three seeds"


# --- Encodings of checkpoints ---

SMALL = ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=16")


def test_beside_the_results_each_model_finds_its_own_checkpoint(tmp_path):
    hashes, files = {}, []
    for name in ("alibi", "rotary", "none"):
        _, hashes[name] = checkpoint_of_bytes(tmp_path / "runs" / name, *SMALL, f"pos_emb={name}")
        files.append(tmp_path / "runs" / name / "evaluation/results.jsonl")
    for name in ("alibi", "rotary"):
        model = model_beside(f"elsewhere/{name}/global_step10", files[:2], hashes[name])
        assert type(model.position) is REGISTRY[name]
    assert model_beside("elsewhere/none/global_step10", files[:2], hashes["none"]) is None
    place = {"checkpoint": "elsewhere/alibi/global_step10", "config_hash": hashes["alibi"]}
    page = page_of_rows(rows("alibi", {512: 9.0}, **place), files=files)
    assert [*page.kernels] == ["1-encoding"]
    shown = page.html("t")
    assert 'aria-label="alibi, seed 1234' in shown
    assert "kernel exp(bias)" in shown
    # Of a sweep's rows and of others, it is one checkpoint; an imported model has no seed.
    (row,) = rows("alibi", {512: 9.0}, **place, sweep="s", origin="LlamaForCausalLM")
    page = page_of_rows([row, row | {"sweep": None, "length": 256}], files)
    assert [*page.kernels] == ["1-encoding"]
    assert "seed 1234" not in page.html("t")


def test_an_encoding_without_a_picture_is_a_gap(tmp_path):
    path, config_hash = checkpoint_of_bytes(tmp_path, *SMALL, "pos_emb=fox")
    page = page_of_rows(rows("fox", {512: 9.0}, checkpoint=str(path), config_hash=config_hash))
    ((place, cause),) = page.gaps
    assert place == "an encoding of fox, seed 1234"
    assert "depends on distance" in cause


def test_the_code_of_a_checkpoint_is_not_run_for_its_picture(tmp_path, own_registry):
    code = "from megatron.positions import Position, register\n\n\n@register('mine')\n"
    (tmp_path / "mine.py").write_text(f"{code}class Mine(Position):\n    pass\n")
    words = [f"pos_emb_file={tmp_path}/mine.py", "pos_emb=mine"]
    path, config_hash = checkpoint_of_bytes(tmp_path, *SMALL, *words)
    FILES.clear()
    del REGISTRY["mine"]
    measured = rows("mine", {512: 9.0}, checkpoint=str(path), config_hash=config_hash)
    ((_, cause),) = page_of_rows(measured).gaps
    assert "is not run unasked" in cause
    assert "mine" not in REGISTRY
