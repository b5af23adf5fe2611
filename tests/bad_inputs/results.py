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
    "loss-is-text": (dict(loss="3.5"), "its loss is '3.5', not a number or null"),
    "loss-is-true": (dict(loss=True), "its loss is True, not a number or null"),
    "loss-is-a-list": (dict(loss=[1.0]), "its loss is a list, not a number or null"),
    "loss-is-negative": (dict(loss=-1.0), "its loss is -1, below 0"),
    "loss-is-null": (dict(loss=None), "its loss is null, its perplexity 2.71828"),
    "perplexity-of-another-loss": (
        dict(perplexity=3.0),
        "its perplexity is 3.0, but exp(loss) is 2.718281828459045",
    ),
    "perplexity-is-null": (
        dict(perplexity=None),
        "its perplexity is null, but exp(loss) is 2.718281828459045",
    ),
    "step-is-a-fraction": (dict(step=0.5), "its step is 0.5, not a whole number"),
    "step-is-huge": (
        dict(step=10**400),
        "its step is a number of too many digits, not a whole number",
    ),
    "length-is-0": (dict(length=0), "its length is 0, not 1 or more"),
    "windows-is-negative": (dict(windows=-1), "its windows is -1, not 1 or more"),
    "tokens-is-text": (dict(tokens="128"), "its tokens is '128', not a whole number"),
    "encoding-is-null": (dict(pos_emb=None), "its pos_emb is null, not text"),
    "options-are-a-list": (dict(pos_emb_args=[1]), "its pos_emb_args is a list, not an object"),
    "cell-is-text": (dict(cell="a"), "its cell is 'a', not an object"),
    "window-is-an-object": (
        dict(window={}),
        "its window is an object, not a whole number or text or null",
    ),
    "sinks-are-text": (dict(sinks="4"), "its sinks is '4', not a whole number or null"),
    "method-is-a-number": (dict(method=4), "its method is 4, not text or null"),
    "blockwise-is-a-number": (dict(blockwise=1), "its blockwise is 1, not true or false"),
    "losses-are-text": (
        dict(window_losses="1.0"),
        "its window_losses is '1.0', not a list of numbers or null",
    ),
    "a-loss-of-many-is-null": (
        dict(window_losses=[1.0, None]),
        "its window_losses is not a list of numbers or null",
    ),
    "too-few-windows": (dict(window_losses=[1.0]), "it has 1 window_losses of 2 windows"),
    "windows-of-another-loss": (
        dict(window_losses=[1.0, 2.0]),
        "its loss is 1.000000, but the mean of its window_losses 1.500000",
    ),
    "counts-of-too-few-windows": (
        dict(window_losses=[1.0, 1.0], window_tokens=[128]),
        "it has 1 window_tokens and 2 window_losses",
    ),
    "a-window-without-tokens": (
        dict(window_losses=[1.0, 1.0], window_tokens=[0, 128]),
        "one of its window_tokens is 0, not 1 or more",
    ),
    "blocks-of-another-size": (dict(block_losses=[1.0]), "its blocks have 512 tokens, the row 128"),
    "blocks-of-another-loss": (
        dict(block_losses=[2.0], block_tokens=[128]),
        "its loss is 1.000000, but the mean of its block_losses 2.000000",
    ),
    "positions-without-edges": (
        dict(position_edges=[0], position_losses=[1.0]),
        "its 1 position_edges do not enclose its 1 position_losses",
    ),
    "positions-fall": (
        dict(position_edges=[2, 1], position_losses=[1.0]),
        "its 2 position_edges do not enclose its 1 position_losses",
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
    "nested-too-deeply": ("[" * 100_000, "it is nested too deeply"),
    "a-key-twice": ('{"loss": 1, "loss": 2}\n', "it has the key 'loss' twice"),
    "number-of-5000-digits": (
        '{"loss": 1' + "0" * 5000 + "}",
        "it has a number of thousands of digits",
    ),
    "half-a-character": (
        '{"pos_emb": "\\ud800"}\n',
        "it has half a character (a single surrogate)",
    ),
    "number-beyond-all": ('{"loss": 1e999}\n', "it has 1e999, which is too large for a number"),
    "minus-infinity": ('{"loss": -Infinity}\n', "it has -Infinity, which is no number in JSON"),
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
        "a-number",
        ["tools/show_results.py", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of evaluate.py, it is no JSON object - give "
            "files of evaluate.py"
        ),
        files={"a.jsonl": "7\n"},
    ),
    Case(
        "an-empty-object",
        ["tools/show_results.py", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of evaluate.py, it lacks pos_emb, step, "
            "config_hash, length, tokens, windows, loss, perplexity - give files of "
            "evaluate.py"
        ),
        files={"a.jsonl": "{}\n"},
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
        "without-step",
        ["tools/show_results.py", "a.jsonl"],
        ("a.jsonl, line 1: is no result of evaluate.py, it lacks step - give files of evaluate.py"),
        files={
            "a.jsonl": (
                '{"pos_emb": "alibi", "config_hash": "ab", "length": 64, '
                '"tokens": 128, "windows": 2, "loss": 1.0, "perplexity": '
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
        "report-of-garbage",
        ["tools/report.py", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of evaluate.py, it is no JSON (Expecting value, "
            "column 1) - give files of evaluate.py, or remove a damaged line and measure "
            "it again"
        ),
        files={"a.jsonl": "x\n"},
    ),
    Case(
        "compare-garbage",
        ["tools/compare.py", "a.jsonl"],
        (
            "a.jsonl, line 1: is no result of evaluate.py, it is no JSON (Expecting value, "
            "column 1) - give files of evaluate.py, or remove a damaged line and measure "
            "it again"
        ),
        files={"a.jsonl": "x\n"},
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
        ".: is a folder - give a file of evaluate.py",
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
        "caveats: give a list of sentences, or leave them out",
    ),
    "caveats-hold-a-mapping": (
        TABLE + "caveats: [{a: b}]\n",
        "caveats: give a list of sentences, or leave them out",
    ),
    "no-utf8": (b"paper: \xff\n", "is no UTF-8 - convert the file"),
    "provenance-is-a-mapping": (
        TABLE.replace("measured here", "{page: 7}"),
        "provenance: is no text - put it in quotes",
    ),
    "too-large": ("#" * (1 << 20) + "\n", "cannot be read (it has more than 1,048,576 bytes)"),
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

BEYOND = {
    "evaluate.py": {
        "--lengths": ("0", "1 to 16,777,216"),
        "--windows": (str(10**12), "1 to 1,000,000"),
        "--start": (str(2**70), "0 to 1,000,000,000,000"),
        "--tail": ("0", "1 to 16,777,216"),
        "--stride": (str(10**12), "1 to 16,777,216"),
        "--step": ("-1", "0 to 1,000,000,000,000"),
    },
    "tools/probe.py": {
        "--lengths": (str(2**70), "1 to 16,777,216"),
        "--depths": (str(10**12), "1 to 1,000"),
        "--trials": ("0", "1 to 1,000,000"),
        "--probe_seed": ("-1", "0 to 9,223,372,036,854,775,807"),
    },
}
for script, options in BEYOND.items():
    for option, (value, bounds) in options.items():
        words = [script, "--checkpoint", "{trained}", option, value]
        message = f"{option}: {value} is beyond its bounds - give {bounds}"
        CASES.append(Case(f"{script} {option} {value}", words, message))
