"""The benchmark of attention on tiny sizes: what it computes and writes, never how fast it was."""

import json
import math
from argparse import Namespace
from itertools import groupby
from statistics import median

import attention as bench_attention
import pytest
import step as bench_step
import torch
from attention import DENSE_COPIES, Candidate, forks
from bench_tables import table
from measure import interleaved, ready

from tests.support import run

SIZE = [
    "--device",
    "cpu",
    "--threads",
    "1",
    "--heads",
    "2",
    "--head_dim",
    "8",
    "--rounds",
    "3",
    "--seconds",
    "9",
]


@pytest.mark.campaign
def test_every_candidate_of_every_pass_is_measured_with_its_conditions(tmp_path):
    words = ["--lengths", "5", "24", "--tokens", "48", "--dtypes", "bfloat16", "--no-memory"]
    words += ["--only", "rotary", "forks", "eager", "sdpa", "--output", tmp_path / "found.json"]
    done = run("tools/bench/attention.py", *SIZE, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    named = {"command", "date", "commit", "hardware", "clock", "threads", "torch"}
    assert named <= found["conditions"].keys()
    rows = {(row["candidate"], row["length"], row["backward"]): row for row in found["rows"]}
    ours = {
        f"{backend}, {kind}"
        for backend in ("eager", "sdpa")
        for kind in ("frozen", "learned", "weight", "window")
    }
    names = {"plain", "rotary", "forks", "forks, rounded distances"} | ours
    assert {name for name, length, backward in rows if backward and length == 24} == names
    assert {name for name, length, backward in rows if not backward and length == 5} == {
        name for name in names if not name.endswith("learned")
    }
    for (_, length, backward), row in rows.items():
        plain = rows["plain", length, backward]
        assert row["reason"] is None
        assert row["batch"] * length <= 48
        assert (row["reference"], len(row["ms"]), len(row["wall_ms"])) == ("plain", 3, 3)
        assert row["median_ms"] == median(row["ms"])
        assert row["ratio"] == median(
            mine / theirs for mine, theirs in zip(row["ms"], plain["ms"], strict=True)
        )
        assert row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]
        assert row["times_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
    assert (tmp_path / "found.md").read_text() == done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]
    assert f"| {' | '.join(['sdpa, frozen', '2 x 24'])} |" in done.stdout


def test_a_dense_way_takes_its_matrices_and_only_those_asked_for_run(tmp_path):
    words = [
        "--lengths",
        "1024",
        "--passes",
        "forward",
        "--tables",
        "frozen",
        "--dtypes",
        "float32",
        "--only",
        "eager",
    ]
    output = tmp_path / "found.json"
    assert bench_attention.main([*SIZE, *words, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    peaks = {row["candidate"]: row["peak_bytes"] for row in found["rows"]}
    matrix = 2 * 1024**2 * 4
    assert peaks.keys() == {"plain", "eager, frozen"}
    assert peaks["plain"] < matrix < 2 * matrix < peaks["eager, frozen"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("kind", "length"), [("frozen", 700), ("window", 700), ("window", 100)])
def test_floors_count_the_pairs_that_a_query_sees_and_what_is_moved(kind, length, backward):
    one = Candidate("sdpa", kind, backward, "bfloat16", length, 3, 2, 8, "cpu")
    pairs = sum(min(query + 1, 512 if kind == "window" else length) for query in range(length))
    assert one.flops == (3.5 if backward else 1) * 3 * 2 * pairs * 2 * 2 * 8
    tensors, tables = (12, 3) if backward else (4, 1)
    assert one.bytes == tensors * 3 * 2 * length * 8 * 2 + tables * 2 * length * 4


def test_the_forks_way_is_the_papers_formula():
    length = 40
    q, k, v = torch.randn(3, 2, 3, length, 8, dtype=torch.float64)
    p, a = torch.rand(2, 3, 1, 1, dtype=torch.float64)
    index = torch.arange(length)
    distance = (index[:, None] - index).tril().double()
    expected = torch.empty_like(q)
    for head in range(3):
        for query in range(length):
            back = torch.arange(query, -1, -1, dtype=torch.float64)
            kernel = -p[head, 0] * torch.log1p(a[head, 0] * back)
            scores = torch.einsum(
                "bd,bkd->bk", q[:, head, query], k[:, head, : query + 1]
            ) / math.sqrt(8)
            expected[:, head, query] = torch.einsum(
                "bk,bkd->bd", (scores + kernel).softmax(-1), v[:, head, : query + 1]
            )
    found = forks(q, k, v, p, a, distance, index[:, None] < index)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_what_cannot_run_is_shown_with_its_reason():
    huge = Candidate("eager", "frozen", False, "float32", 2**20, 1, 12, 64, "cpu")
    unknown = Candidate("no_such_backend", "frozen", False, "float32", 8, 1, 2, 8, "cpu")
    calls, reasons = ready([huge, unknown])
    assert not calls
    assert (
        reasons[huge.name] == f"not run: needs {DENSE_COPIES[False] * 12 * 2**42 / 2**30:.1f} GiB"
    )
    assert reasons[unknown.name].startswith(
        "not run: attention_backend: 'no_such_backend' is not known"
    )
    assert "a / b" in table(["name"], [["a | b"]])


def test_rounds_rotate_and_the_reference_runs_as_long_as_anybody():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    interleaved(calls, "a", Namespace(rounds=3, seconds=math.inf, device="cpu"))
    # the first three are warm-up
    assert "".join(name for name, _ in groupby(order)) == "abc" + "abc" + "bca" + "cab"
    timings = interleaved(calls, "a", Namespace(rounds=3, seconds=0, device="cpu"))
    assert {name: len(found) for name, found in timings.items()} == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("tool", [bench_attention, bench_step])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--output", "/no/folder/a.json"],
            "--output: /no/folder/a.json must end in .json and lie in a folder that exists",
        ),
        (["--device", "cuda"], "--device: torch finds no CUDA device; use --device cpu"),
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1"),
        (["--lengths", "12.5"], "argument --lengths: '12.5' is not a whole number of at least 1"),
    ],
)
def test_a_bad_argument_is_one_message(tool, words, message, capsys):
    try:
        status = tool.main(words)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status in (1, 2)
    assert printed.err.count(message) == 1
    assert not printed.out
