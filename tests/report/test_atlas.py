"""docs/atlas.md and atlas_table.html have the numbers of today's rows, in every cell."""

import csv
import re

import pytest

from megatron.report.catalogue import ATLAS, COSTS, atlas
from megatron.results.atlas import PARTS, atlas_rows, standings
from tests.support import call


@pytest.fixture(scope="module")
def texts():
    return atlas()


@pytest.fixture(scope="module")
def measured():
    return standings(atlas_rows())


def test_the_pages_are_up_to_date(texts):
    for ending, text in texts.items():
        assert ATLAS[ending].read_text(encoding="utf-8") == text, "run: make docs"


def test_both_have_a_line_with_every_number_of_an_encoding(texts, measured):
    with COSTS.open(encoding="utf-8") as file:
        costs = {line["pos_emb"]: line for line in csv.DictReader(file)}
    guide = texts[".md"].partition("## Guide")[2].partition("## What they reach")[0]
    assert len(re.findall(r"[^\W_][\w'/-]*", re.sub(r"\]\(.*?\)", "", guide))) <= 300
    assert list(measured.cells) == ["score", *PARTS, "effective length"]
    for name, numbers in measured.cells.iterrows():
        assert f"| {' | '.join([name, *numbers])} |" in texts[".md"]
        (line,) = re.findall(rf"<tr class=[^>]*><td>{name}</td>.*?</tr>", texts[".html"], re.DOTALL)
        cells = [re.sub("<svg.*", "", cell) for cell in re.findall("<td>(.*?)</td>", line)]
        assert cells[1:8] == numbers.tolist()
        if name in costs:
            keys = ("step_ratio", "step_4096_ratio", "token_4096_ratio")
            times = [f"{float(costs[name][key]):.2g}" if costs[name][key] else "" for key in keys]
            assert cells[9:12] == times
            assert re.search(rf"\| \[{name}\].* \| {' [|] '.join(times)} \|", texts[".md"])


def test_a_curve_has_its_lengths_in_doublings(texts, measured):
    """From 128 to 4,096 tokens of text, where perplexities of 10 and of 200 are the edges."""
    (line,) = re.findall("<tr class=[^>]*><td>rotary</td>.*?</tr>", texts[".html"], re.DOTALL)
    text, recall = (re.findall('points="(.*?)"', line)[column] for column in (0, 3))
    curves = measured.curves.loc["rotary"]
    lengths = {0: 128, 32: 512, 48: 1024, 64: 2048, 80: 4096}
    assert (len(text.split()), len(recall.split())) == (5, 6)
    for point in text.split():
        x, y = map(float, point.split(","))
        perplexity = 10 * 20 ** ((20 - y) / 20)
        assert perplexity == pytest.approx(min(200, curves["text", lengths[x]]), rel=0.01)
    for point in recall.split():
        x, y = map(float, point.split(","))
        assert 5 * (20 - y) == pytest.approx(curves["recall", 32 * 2 ** (x / 16)], abs=0.26)


def test_the_commands_of_the_page_run(capsys, own_registry):
    text = ATLAS[".md"].read_text(encoding="utf-8")
    (check,) = re.findall(r"^python (tools/sweep\.py check .*)$", text, re.MULTILINE)
    done = call(*check.split())
    assert done.stdout.endswith(": 90 rows of 15 cells follow the rules\n"), done.stderr
    (run,) = re.findall(r"^python (tools/sweep\.py run .*)$", text, re.MULTILINE)
    plan = call(*run.split(), "--dry-run").stdout
    assert "atlas: 15 cells" in plan
    (folder,) = re.findall(r"^cp (runs/sweeps/[^/]*)/results\.jsonl ", text, re.MULTILINE)
    assert f"runs in {folder}\n" in plan
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    assert r"mep\_free & 92 $\pm$ 1 & 97" in capsys.readouterr().out
