"""tools/report.py on what evaluation and probes leave, and its page in a browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

from megatron.evaluation.evaluate_checkpoint import evaluate
from megatron.evaluation.options import Options
from megatron.evaluation.probe_checkpoint import ProbeOptions, probe
from megatron.results.files import read_results, write_results
from tests.checkpoints import make_checkpoint
from tests.support import ROOT
from tools.report import main

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
# Clicks as a user would, and leaves what a user would get in the page.
CLICKS = """<script>
const copied = [], orders = [];
const writeText = async (text) => { copied.push(text); };
Object.defineProperty(navigator, "clipboard", { value: { writeText } });
const [table, demo] = document.querySelectorAll("section table:not(.table ~ .table table)");
for (const one of [table, demo]) {
  const heading = [...one.tHead.rows[0].cells].at(-1);
  for (const _ of [1, 2]) {
    heading.firstChild.click();
    const labels = [...one.tBodies[0].rows].map((row) => row.cells[0].textContent);
    orders.push([heading.getAttribute("aria-sort"), ...labels]);
  }
}
for (const kind of ["markdown", "latex"]) {
  table.closest(".table").querySelector(`[data-copy=${kind}]`).click();
}
const wide = document.documentElement.scrollWidth > innerWidth;
document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
found.textContent = JSON.stringify({ orders, copied, wide });
</script></body>"""


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """Two checkpoints, one probed; and the demo's rows of others."""
    folder = tmp_path_factory.mktemp("reported")
    files = []
    for name in ("alibi", "learned"):
        run = folder / name
        make_checkpoint(run, corpus, f"pos_emb={name}", "max_position_embeddings=64")
        files.append(folder / f"{name}.jsonl")
        evaluate(None, Options(str(run), lengths=[64, 128], output=files[-1]))
    files.append(folder / "probes.jsonl")
    asked = {"lengths": [64], "depths": 2, "trials": 1, "output": files[-1]}
    probe(None, ProbeOptions(str(folder / "alibi"), **asked))
    files.append(folder / "demo.jsonl")  # of models that are nowhere, even after `make demo`
    files[-1].write_text((ROOT / "docs/demo.jsonl").read_text().replace('"demo/', '"gone/'))
    words = [*map(str, files), "-o", str(folder / "report.html")]
    assert main([*words, "--plots", str(folder / "plots")]) == 0
    return folder


def test_the_page_shows_what_lies_beside_the_rows_and_names_what_does_not(folder, tmp_path):
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[:2] == ["tiny valid: equal_tokens", "stdlib valid: equal_tokens"]
    assert headings[2:] == ["Probes", "Kernels", "Models", "What is missing"]
    assert "learned positions end at 64" in page
    assert re.search(r"\d times: gone/\w+/global_step\d+; .*: not found from here", page)
    assert "loss - alibi" in page, "alibi has a number at the longest length, learned has none"
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    names = {path.stem for path in (folder / "plots").iterdir()}
    assert {"perplexity", "2-perplexity", "1-encoding"} <= names
    for name in names:
        for suffix, start in starts.items():
            assert (folder / "plots" / f"{name}{suffix}").read_bytes().startswith(start)

    shutil.copytree(folder / "alibi/global_step5", tmp_path / "sweep/alibi/global_step5")
    results, moved = tmp_path / "sweep/results.jsonl", tmp_path / "a.html"
    place = {"checkpoint": "/gone/alibi/global_step5"}
    write_results(results, [row | place for row in read_results([folder / "alibi.jsonl"])])
    assert main([str(results), "-o", str(moved)]) == 0
    assert "kernel exp(bias)" in moved.read_text(encoding="utf-8"), "beside the results"


def test_a_bad_name_is_one_message_and_nothing_is_replaced(folder, tmp_path, capsys):
    mine, results = tmp_path / "mine.html", folder / "alibi.jsonl"
    mine.write_text("mine")
    messages = {
        mine: "mine.html exists and is no page - choose another name",
        tmp_path / "a.pdf": "a.pdf is no name of a page - name it",
    }
    for output, message in messages.items():
        assert main([str(results), "-o", str(output)]) == 1
        assert message in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the path")
@pytest.mark.parametrize("width", [1280, 500])
def test_in_a_browser_columns_sort_tables_are_copied_and_nothing_sticks_out(
    folder, tmp_path, width
):
    page = (folder / "report.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(page.replace("</body>", CLICKS), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
    ]
    shown = subprocess.run(
        [BROWSER, *flags, f"--window-size={width},900", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', shown)[1]))
    # learned has no number at 128 and is last in either direction
    assert found["orders"][:2] == [
        ["ascending", "alibi", "learned"],
        ["descending", "alibi", "learned"],
    ]
    assert found["orders"][2:] == [
        ["ascending", "mep_free", "rotary"],
        ["descending", "rotary", "mep_free"],
    ]
    markdown, latex = found["copied"]
    number = re.search(r"\| alibi \| 1 \| ([0-9.]+)(?: \\?\[[^|]*)? \| ", markdown)[1]
    assert markdown.startswith(
        "| pos\\_emb | seeds | 64\\* | 128 |\n| --- | ---: | ---: | ---: |\n"
    )
    assert float(number) == pytest.approx(
        json.loads((folder / "alibi.jsonl").read_text().split("\n")[0])["perplexity"], rel=1e-3
    )
    assert latex.startswith(
        "\\begin{tabular}{lrrr}\n\\toprule\npos\\_emb & seeds & 64* & 128 \\\\\n\\midrule\n"
    )
    assert latex.rstrip().endswith("\\bottomrule\n\\end{tabular}")
    assert not found["wide"], "the page scrolls sideways"
