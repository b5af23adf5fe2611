"""The page of docs/results: every label says what differs, and every table fits."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from megatron.errors import UserError
from megatron.report.page import page_of_rows, reference_of
from megatron.results.comparison import compared, encodings
from megatron.results.files import read_results
from megatron.results.labels import kinds
from megatron.results.probes import read_probes
from tests.support import ROOT

ENCODINGS = [
    "sinusoidal",
    "rotary",
    "t5",
    "alibi",
    "kerple_log",
    "kerple_power",
    "mep_free",
    "mep_param",
]
FILES = sorted((ROOT / "docs" / "results").glob("cpu-*.jsonl"))
PROBES = [path for path in FILES if "probes" in path.name]
ROWS = [path for path in FILES if path not in PROBES]

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


class Labels(HTMLParser):
    """The first cell of every line of the first table under each heading."""

    def __init__(self, page):
        super().__init__()
        self.of: dict[str, list[str]] = {}
        self.heading, self.tables, self.cells = "", 0, 0
        self.reading = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "h2":
            self.heading, self.tables, self.reading = "", 0, "heading"
        elif tag == "table":
            self.tables += 1
        elif tag == "tr":
            self.cells = 0
        elif tag in ("th", "td"):
            self.cells += 1
            if self.cells == 1 and self.tables == 1:
                self.of.setdefault(self.heading, []).append("")
                self.reading = "label"

    def handle_endtag(self, tag):
        if tag in ("h2", "th", "td"):
            self.reading = ""

    def handle_data(self, data):
        if self.reading == "heading":
            self.heading += data
        elif self.reading == "label":
            self.of[self.heading][-1] += data


@pytest.fixture(scope="module")
def page():
    return page_of_rows(read_results(ROWS), read_probes(PROBES), {}).html("t")


@pytest.fixture(scope="module")
def labels(page):
    return {heading: found[1:] for heading, found in Labels(page).of.items()}


def test_a_windowed_row_says_so_where_others_have_no_window(labels):
    (heading,) = [name for name in labels if "environment" in name and "equal_tokens" in name]
    windowed = {f"{name}, window 512" for name in ENCODINGS}
    without = {f"{name}, window none" for name in ENCODINGS}
    assert {*labels[heading]} == windowed | without
    assert len(labels[heading]) == 16


def test_all_other_sections_need_no_more_than_the_encoding(labels):
    sections = {
        name: found
        for name, found in labels.items()
        if " valid" in name and not ("environment" in name and "equal_tokens" in name)
    }
    assert len(sections) == 2
    for name, found in sections.items():
        assert sorted(found) == sorted(ENCODINGS), name


def test_the_tools_that_compare_have_the_labels_of_the_page(labels):
    found = kinds(read_results(ROWS))
    assert {*found} == {f"{name}, window {n}" for name in ENCODINGS for n in ("none", "512")}


def test_against_means_the_same_in_compare_and_on_the_page():
    rows = read_results(ROWS)
    tail = kinds([row for row in rows if row["protocol"] == "tail"])
    for against, label, in_section in (
        ("mep_free, window none", "mep_free, window none", "mep_free"),
        ("alibi, protocol tail", "alibi, window none", "alibi"),
        # The protocol `tail` has no windows: the page takes the lowest there.
        ("t5, window train_length", "t5, window 512", None),
    ):
        assert compared(encodings(rows), against)[0].reference == label
        assert reference_of(tail, against) == (in_section or reference_of(tail, None))
    for against, problem in {"alibi": "means several", "rope": "is no encoding"}.items():
        with pytest.raises(UserError, match=f"--against: '{against}' {problem}"):
            compared(encodings(rows), against)
        with pytest.raises(UserError, match=f"--against: '{against}' {problem}"):
            page_of_rows(rows, [], {}, against)


def test_the_page_compares_with_the_lowest_encoding_that_has_all_three_seeds():
    rows = read_results(ROWS)
    found = kinds([row for row in rows if row["protocol"] == "equal_tokens"])
    assert reference_of(found, None) == "mep_free, window none"


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the path")
def test_at_1200_pixels_no_table_scrolls_sideways(page, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", MEASURE), encoding="utf-8")
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
