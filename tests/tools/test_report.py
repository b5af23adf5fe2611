"""tools/report.py: from results files to a page and pictures, and the page in a browser."""

import contextlib
import html
import json
import re
import shutil
import subprocess

import pytest

from megatron.results.files import write_results
from tests.checkpoints import checkpoint_of_bytes
from tests.results.rows import answers, rows
from tests.support import ROOT
from tools.report import main

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
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
def page(tmp_path_factory):
    """The page of two encodings, one without a number at 1024, of the demo and of a task."""
    folder = tmp_path_factory.mktemp("reported")
    measured = rows("alibi", {512: 10.0, 1024: 9.0}) + rows("learned", {512: 13.5})
    measured += rows("learned", {1024: None}, reason="learned positions end at 512")
    write_results(folder / "a.jsonl", measured)
    write_results(folder / "task.jsonl", answers("alibi", {512: 1.0, 1024: 0.25}))
    words = [str(folder / "a.jsonl"), str(ROOT / "docs/demo.jsonl"), str(folder / "task.jsonl")]
    words += ["-o", str(folder / "report.html"), "--plots", str(folder / "plots")]
    # Not where `make demo` has left the checkpoints of its rows, whose encodings would be drawn.
    with contextlib.chdir(folder):
        assert main([*words, "--title", "Two <texts>"]) == 0
    return folder / "report.html"


def test_the_command_writes_a_page_and_its_figures(page):
    text = html.unescape(page.read_text(encoding="utf-8"))
    headings = re.findall(r"<h[12]>(.*?)</h[12]>", text)
    assert headings[:3] == ["Two <texts>", "Tasks", "stdlib valid: equal_tokens"]
    assert headings[4:] == ["task:copy", "Kernels", "Models", "What is missing"]
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    pictures = list((page.parent / "plots").iterdir())
    names = ("perplexity", "2-perplexity", "3-accuracy")
    expected = {f"{name}{suffix}" for name in names for suffix in starts}
    assert {path.name for path in pictures} == expected
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in pictures)


def test_a_damaged_checkpoint_is_on_the_terminal_and_in_the_exit_status(tmp_path, capsys):
    sizes = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=16"]
    checkpoint, config_hash = checkpoint_of_bytes(tmp_path / "run", *sizes)
    facts = {"checkpoint": str(checkpoint), "config_hash": config_hash}
    write_results(tmp_path / "a.jsonl", rows("rotary", {512: 10.0}, **facts))
    words = [str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "page.html")]
    assert main(words) == 0
    for name in ("model.safetensors", "checkpoint.json"):
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[:100])
        assert main(words) == 1
        assert f"encodings that are not drawn:\n{file}: " in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the path")
def test_in_a_browser_columns_sort_tables_are_copied_and_nothing_sticks_out(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</body>", CLICKS), encoding="utf-8")
    address = (tmp_path / "page.html").as_uri()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    for width in (1280, 500):
        words = [BROWSER, *flags, "--dump-dom", f"--window-size={width},900", address]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        dumped = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout)[1]
        measured = json.loads(html.unescape(dumped))
        # learned has no number at 1024 and is last in either direction
        assert measured["orders"][:2] == [
            ["ascending", "alibi", "learned"],
            ["descending", "alibi", "learned"],
        ]
        assert [order[1:] for order in measured["orders"][2:]] == [
            ["mep_free", "rotary"],
            ["rotary", "mep_free"],
        ]
        markdown, latex = measured["copied"]
        assert markdown.splitlines()[:3] == [
            "| pos\\_emb | seeds | 512\\* | 1024 |",
            "| --- | ---: | ---: | ---: |",
            "| alibi | 1 | 10.00 | 9.00 |",
        ]
        assert latex.splitlines()[2:4] == ["pos\\_emb & seeds & 512* & 1024 \\\\", "\\midrule"]
        assert not measured["wide"], "the page scrolls sideways"
