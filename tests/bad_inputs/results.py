"""Bad results files, and places where results cannot be written."""

import json
import math

from tests.bad_inputs.case import Case

ROW = {
    "pos_emb": "alibi",
    "step": 4,
    "config_hash": "ab",
    "length": 64,
    "tokens": 128,
    "windows": 2,
    "loss": 1.0,
    "perplexity": math.e,
}
# What the second of two rows has instead, and what is said of it.
CHANGES = {
    "loss-is-text": (dict(loss="3.5"), "its loss is '3.5': input should be a valid number"),
    "loss-is-negative": (dict(loss=-1.0), "its loss is -1, below 0"),
    "loss-is-null": (dict(loss=None), "its loss is null, its perplexity 2.71828"),
    "perplexity-of-another-loss": (
        dict(perplexity=3.0),
        "its perplexity is 3.0, but exp(1) is 2.718281828459045",
    ),
    "step-is-a-fraction": (dict(step=0.5), "its step is 0.5: input should be a valid integer"),
    "too-few-windows": (dict(window_losses=[1.0]), "it has 1 window_losses of 2 windows"),
    "windows-of-another-loss": (
        dict(window_losses=[1.0, 2.0]),
        "its loss is 1.000000, but the mean of its window_losses 1.500000",
    ),
    "a-window-without-tokens": (
        dict(window_losses=[1.0, 1.0], window_tokens=[0, 128]),
        "its 2 window_losses do not fit their 2 numbers of tokens",
    ),
    "blocks-of-another-size": (dict(block_losses=[1.0]), "its blocks have 512 tokens, the row 128"),
    "blocks-of-another-loss": (
        dict(block_losses=[2.0], block_tokens=[128]),
        "its loss is 1.000000, but the mean of its block_losses 2.000000",
    ),
    "positions-of-another-loss": (
        dict(position_edges=[0, 2], position_losses=[2.0]),
        "its loss is 1.000000, but the mean of its position_losses 2.000000",
    ),
}
# A line that holds no row, and why.
LINES = {
    "no-json": ("loss 3\n", "it is no JSON (Expecting value, column 1)"),
    "no-utf8": (b"\xff\n", "it is no UTF-8"),
    "a-key-twice": ('{"loss": 1, "loss": 2}\n', "it has the key 'loss' twice"),
    "number-of-5000-digits": (
        '{"loss": 1' + "0" * 5000 + "}",
        "it has a number of thousands of digits",
    ),
}


def two_rows(**change: object) -> str:
    """A good row, and another one with some values changed."""
    second = {**ROW, "length": 32, **change}
    return json.dumps(ROW) + "\n" + json.dumps(second) + "\n"


CASES: list[Case] = [
    Case(
        "empty",
        ["tools/show_results.py", "a.jsonl"],
        "a.jsonl: is empty - leave it out, or write results with evaluate.py",
        files={"a.jsonl": ""},
    ),
    Case(
        "a-list",
        ["tools/show_results.py", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of evaluate.py, it is no JSON object - give "
            "files of evaluate.py"
        ),
        files={"a.jsonl": "[1]\n"},
    ),
    Case(
        "without-loss",
        ["tools/show_results.py", "a.jsonl"],
        ("a.jsonl, line 1: is no result of evaluate.py, it lacks loss - give files of evaluate.py"),
        files={
            "a.jsonl": (
                '{"pos_emb": "alibi", "step": 4, "config_hash": "ab", '
                '"length": 64, "tokens": 128, "windows": 2, "perplexity": '
                "2.718281828459045}\n"
            )
        },
    ),
    Case(
        "loss-is-nan",
        ["tools/show_results.py", "a.jsonl"],
        (
            "a.jsonl, line 2: is no result of evaluate.py, it has NaN, which is no number "
            "in JSON - give files of evaluate.py, or remove a damaged line and measure it "
            "again"
        ),
        files={"a.jsonl": two_rows(loss=math.nan)},
    ),
    Case(
        "checksum-of-another-line",
        ["tools/show_results.py", "a.jsonl"],
        (
            "a.jsonl, line 2: does not agree with its checksum, it was damaged or edited - "
            "remove the line, and measure it again with evaluate.py (if you edited it, "
            "remove its key checksum)"
        ),
        files={"a.jsonl": two_rows(checksum="00000000")},
    ),
    Case(
        "probes-among-results",
        ["tools/report.py", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of tools/probe.py, it lacks pos_emb, step, "
            "config_hash, length - give files of tools/probe.py"
        ),
        files={"a.jsonl": '{"probe": "copy"}\n'},
    ),
    Case(
        "absent",
        ["tools/show_results.py", "none.jsonl"],
        "none.jsonl: there is no such results file - evaluate.py writes one",
    ),
    Case(
        "reproduce-garbage",
        ["tools/reproduce.py", "kerple_table5", "--results", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of evaluate.py, it is no JSON (Expecting "
            "property name enclosed in double quotes, column 2) - give files of "
            "evaluate.py, or remove a damaged line and measure it again"
        ),
        files={"a.jsonl": "{\n"},
    ),
    Case(
        "a-folder",
        ["tools/show_results.py", "."],
        ".: cannot be read (it is no regular file)",
    ),
]

TABLE = """paper: mine
provenance: measured here
sweep: null
quantity: perplexity
cells: {github: {alibi: {512: [3.4]}}}
"""
TABLES = {
    "caveats-are-a-number": (
        TABLE + "caveats: 3\n",
        "caveats: Input should be a valid tuple",
    ),
    "no-utf8": (b"paper: \xff\n", "is not YAML: 'utf-8' codec"),
    "provenance-is-a-mapping": (
        TABLE.replace("measured here", "{page: 7}"),
        "provenance: Input should be a valid string",
    ),
}
for name, (content, fault) in TABLES.items():
    words = ["tools/reproduce.py", "mine.yml", "--results", "a.jsonl"]
    files = {"mine.yml": content, "a.jsonl": two_rows()}
    CASES.append(Case(f"table-{name}", words, f"mine.yml: {fault}", files=files))

IN_THE_WAY = "{}: File exists - it is in the way: move it, or choose another place"
OUTPUTS = {
    "plot-below-a-file": (
        ["tools/show_results.py", "a.jsonl", "-o", "file/plot.png"],
        IN_THE_WAY.format("file"),
    ),
    "plots-of-encodings-in-a-file": (
        ["tools/plot_positions.py", "alibi", "-o", "file"],
        IN_THE_WAY.format("file"),
    ),
    "plots-of-a-page-in-a-file": (
        ["tools/report.py", "a.jsonl", "--plots", "file"],
        "--plots: file is a file - name a folder",
    ),
    "probes-alone": (
        ["tools/compare.py", "probes.jsonl"],
        "compare.py: every file holds probes - give files of evaluate.py",
    ),
}
for name, (words, message) in OUTPUTS.items():
    files = {"a.jsonl": two_rows(), "file": "text", "probes.jsonl": '{"probe": "copy"}\n'}
    CASES.append(Case(name, words, message, files=files))
for name, (change, fault) in CHANGES.items():
    message = f"a.jsonl, line 2: {fault} - remove the line, and measure it again with evaluate.py"
    words = ["tools/show_results.py", "a.jsonl"]
    CASES.append(Case(name, words, message, files={"a.jsonl": two_rows(**change)}))
for name, (line, fault) in LINES.items():
    message = (
        f"a.jsonl, line 1: is no result of evaluate.py, {fault}"
        " - give files of evaluate.py, or remove a damaged line and measure it again"
    )
    words = ["tools/show_results.py", "a.jsonl"]
    CASES.append(Case(name, words, message, files={"a.jsonl": line}))
