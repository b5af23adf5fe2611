"""The page of docs/results: its labels, and its tables in a browser where there is one."""

import html
import json
import re
import shutil
import subprocess

import pytest

from megatron.report.html.files import read_files
from megatron.report.html.page import Page
from tests.report.support import Reader
from tests.support import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
# Leaves in the page how wide each table is, and how much of it is shown.
MEASURE = """<script>
const boxes = [...document.querySelectorAll(".scroll")];
const tables = boxes.map((one) => [one.scrollWidth, one.clientWidth]);
const page = document.documentElement.scrollWidth;
document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
found.textContent = JSON.stringify({ tables, page, width: innerWidth });
</script></body>"""


@pytest.fixture(scope="module")
def published():
    """The page of the rows in docs/results, without the probes."""
    rows, _ = read_files(sorted((ROOT / "docs" / "results").glob("*.jsonl")))
    return Page(rows, [], {}).html("Results")


def labels_of(page):
    """The labels in the table of each text and protocol, by the heading of its section."""
    found = {}
    for heading, section in re.findall(r"<h2>(.*?)</h2>(.*?)</section>", page, flags=re.DOTALL):
        if ": " in heading:
            tables = Reader(section).tables
            found[heading] = [line[0] for line in tables[0][1:]]
    return found


def test_every_label_says_window_where_a_window_was_used(published):
    labels = labels_of(published)
    for heading, names in labels.items():
        assert len(set(names)) == len(names), heading
        assert not any("data" in name for name in names), heading
    both = labels["github valid: equal_tokens"]
    plain = {name.removesuffix(", window none") for name in both if name.endswith("none")}
    baseline = {name.removesuffix(", window 512") for name in both if name.endswith("512")}
    assert plain == baseline
    assert len(both) == len(plain) + len(baseline)
    assert {"mep_free", "rotary", "alibi", "t5"} <= plain
    assert {"sinusoidal", "rotary", "alibi"} <= set(labels["arxiv valid: equal_tokens"])


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the path")
def test_at_1200_pixels_no_table_scrolls_sideways(published, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(published.replace("</body>", MEASURE), encoding="utf-8")
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
        "--window-size=1200,900",
    ]
    done = subprocess.run(
        [BROWSER, *words, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    found = json.loads(html.unescape(text))
    assert found["width"] == 1200
    assert len(found["tables"]) >= 10
    assert all(whole <= shown for whole, shown in found["tables"])
    assert found["page"] <= found["width"]
