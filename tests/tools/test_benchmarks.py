"""The benchmarks on tiny sizes: what they compute and write, never how fast it was."""

import json
import math

import attention as bench_attention
import pytest
import step as bench_step
import torch
from attention import forks

from megatron.attention import attention
from megatron.positions import REGISTRY, Shape, build
from tests.encodings import FEW

QUICK = ["--threads", "1", "--rounds", "3"]
HEADS = ["--heads", "2", "--head_dim", "8", "--dtypes", "float32"]
MODEL = ["--hidden", "32", "--layers", "2", "--heads", "4", "--vocab", "40", "--train_length", "16"]


def rows_of(tool, output, words, status=0):
    """The rows that a benchmark writes, by group and candidate."""
    assert tool.main([*QUICK, *words, "--output", str(output)]) == status
    record = json.loads(output.read_text())
    assert "threads 1, commit " in record["conditions"]
    return {(row["group"], row["candidate"]): row for row in record["rows"]}


def test_every_way_is_measured_beside_plain_attention(tmp_path, capsys):
    tables = bench_attention.ENCODINGS
    words = ["--lengths", "24", "--tokens", "48", *HEADS, "--tables", *tables]
    rows = rows_of(bench_attention, tmp_path / "rows.json", words)
    biased = {f"{backend}, {kind}" for backend in ("eager", "sdpa") for kind in tables}
    groups = ("float32, forward, 2 x 24", "float32, forward and backward, 2 x 24")
    names = {"plain", "forks, learned"} | biased
    assert rows.keys() == {(group, name) for name in names for group in groups}
    for (group, _), row in rows.items():
        reference = rows[group, "plain"]["ms"]
        assert (row["reason"], row["tokens"], len(row["ms"])) == (None, 48, 3)
        ratios = [mine / theirs for mine, theirs in zip(row["ms"], reference, strict=True)]
        assert row["ratios"] == pytest.approx(ratios)
    assert "| sdpa, frozen | " in capsys.readouterr().out


def test_a_dense_way_takes_its_matrices(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_attention, "LONGEST_DENSE", 1024)
    words = ["--lengths", "1024", "2048", "--tables", "frozen", "--ways", "eager", "sdpa", *HEADS]
    words += ["--rounds", "1"]
    rows = rows_of(bench_attention, tmp_path / "rows.json", words)
    short, long = (f"float32, forward, 1 x {length}" for length in (1024, 2048))
    assert (long, "plain") in rows
    assert (long, "eager, frozen") not in rows
    matrix = 2 * 1024**2 * 4
    assert rows[short, "eager, frozen"]["peak_bytes"] > 2 * matrix
    assert rows[short, "sdpa, frozen"]["peak_bytes"] < matrix


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_measured_on_the_function_of_ours():
    q, k, v = torch.randn(3, 1, 2, 128, 16)
    table = torch.randn(2, 128)
    causal = bench_attention.causal_mask(128)
    with torch.compiler.set_stance("force_eager"):
        output = bench_attention.flex(q, k, v, table, causal)
    torch.testing.assert_close(output, attention(q, k, v, table))


def test_the_forks_way_is_the_papers_formula():
    length = 40
    q, k, v = torch.randn(3, 2, 3, length, 8, dtype=torch.float64)
    p, a = torch.rand(2, 3, 1, 1, dtype=torch.float64)
    index = torch.arange(length)
    distance = (index[:, None] - index).tril().double()
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(8) - p * torch.log1p(a * distance)
    probabilities = scores.masked_fill(index[:, None] < index, -torch.inf).softmax(-1)
    output = forks(q, k, v, p, a, distance, index[:, None] < index)
    torch.testing.assert_close(output, probabilities @ v, rtol=1e-10, atol=1e-10)


def test_what_cannot_run_has_a_reason_and_ends_with_1(tmp_path):
    words = ["--lengths", "8", "--tokens", "8", "--tables", "frozen"]
    words += [*HEADS, "--head_dim", "136", "--ways", "triton"]
    rows = rows_of(bench_attention, tmp_path / "rows.json", words, status=1)
    row = rows["float32, forward, 1 x 8", "triton, frozen"]
    assert "triton" in row["reason"]
    assert row["ratios"] == []


def test_steps_and_evaluations_are_measured_against_the_first_and_traced(tmp_path, capsys):
    words = [*MODEL, "--encodings", "rotary", "learned", "cable", "--length", "300"]
    words += ["--batch", "2", "--trace", str(tmp_path / "trace.json.gz")]
    rows = rows_of(bench_step, tmp_path / "rows.json", words, status=1)
    printed = capsys.readouterr().out
    step, evaluation = "step of 2 x 16 tokens", "evaluation of 1 x 300 tokens"
    names = {"rotary", "learned", "cable"}
    assert rows.keys() == {(group, name) for group in (step, evaluation) for name in names}
    refused = rows.pop((evaluation, "learned"))
    assert refused["ms"] == []
    assert f"| learned | {refused['reason']} |" in printed
    for (group, _), row in rows.items():
        assert row["reason"] is None
        length = 16 if group == step else 300
        assert row["tokens"] == (32 if group == step else 300)
        # PaLM: 2 operations for each weight (12 hidden² a layer), 4 * hidden * length for scores.
        forward = 2 * (2 * 12 * 32**2 + 32 * 40) + 2 * 4 * 32 * length
        assert row["flops"] == row["tokens"] * forward * (3 if group == step else 1)
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert "Self CPU" in printed


def test_every_encoding_has_a_line(monkeypatch, capsys):
    for name in REGISTRY:
        build(name, Shape(3, 8, 24, 16), **bench_step.options_in_file(name, 32))
    assert bench_step.options_in_file("learned", 32)["max_positions"] == 32
    monkeypatch.setattr(bench_step, "REGISTRY", FEW)  # of each kind, to save time
    words = ["--encodings", "all", "--length", "32", "--rounds", "1"]
    assert bench_step.main([*MODEL, *words]) == 0
    printed = capsys.readouterr().out
    for name in FEW:
        assert printed.count(f"| {name} |") >= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rounds 0", "--rounds: '0' is not a whole number of at least 1"),
        ("--heads 5", "--hidden: 768 cannot be split over --heads 5"),
        ("--output README.md", "README.md exists and is no output that may be replaced"),
    ],
)
def test_a_bad_argument_is_one_message(words, message, capsys):
    try:
        status = bench_step.main(words.split())
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status in (1, 2)
    assert printed.err.count(message) == 1
    assert not printed.out
