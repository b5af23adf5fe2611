"""The benchmarks on tiny sizes: what they compute and write, never how fast it was."""

import json
import math
from statistics import median

import attention as bench_attention
import pytest
import step as bench_step
import torch
from attention import forks
from torch import nn

from megatron.model.settings import Architecture
from megatron.positions import REGISTRY, Shape, build
from tests.encodings import SAMPLE

CPU = ["--device", "cpu", "--threads", "1", "--rounds", "3"]
HEADS = ["--heads", "2", "--head_dim", "8", "--dtypes", "float32"]
MODEL = ["--hidden", "32", "--layers", "2", "--heads", "4", "--vocab", "40", "--train_length", "16"]


def rows_of(tool, output, words, status=0):
    """The rows that a benchmark writes, by candidate."""
    assert tool.main([*CPU, *words, "--output", str(output)]) == status
    record = json.loads(output.read_text())
    assert "threads 1, commit " in record["conditions"]
    return {
        (row["candidate"], row.get("backward", row.get("training"))): row for row in record["rows"]
    }


def test_every_way_is_measured_beside_plain_attention(tmp_path, capsys):
    words = ["--lengths", "24", "--tokens", "48", "--no-memory", *HEADS]
    rows = rows_of(bench_attention, tmp_path / "rows.json", words)
    backends = ("eager", "sdpa")
    biased = {f"{backend}, {bias}" for backend in backends for bias in bench_attention.BIASES}
    names = {"plain", "rotary", "path", "path_fox", "forks"} | biased
    assert rows.keys() == {(name, backward) for name in names for backward in (False, True)}
    for (_, backward), row in rows.items():
        reference = rows["plain", backward]["ms"]
        assert (row["reason"], row["batch"], len(row["ms"])) == (None, 2, 3)
        ratios = [mine / theirs for mine, theirs in zip(row["ms"], reference, strict=True)]
        assert row["ratios"] == pytest.approx(ratios)
    assert "| sdpa, frozen | 2 x 24 |" in capsys.readouterr().out


def test_a_dense_way_takes_its_matrices(tmp_path):
    words = ["--lengths", "1024", "8192", "--tables", "frozen", "--ways", "eager", *HEADS]
    words += ["--rounds", "1"]
    rows = rows_of(bench_attention, tmp_path / "rows.json", words)
    assert rows["plain", False]["length"] == 8192
    (row,) = (
        row for row in rows.values() if row["candidate"] == "eager, frozen" and not row["backward"]
    )
    assert row["length"] == 1024
    matrix = 2 * 1024**2 * 4
    assert row["peak_bytes"] > 2 * matrix
    rows = rows_of(
        bench_attention, tmp_path / "rows.json", ["--lengths", "1024", *HEADS, "--ways", "rotary"]
    )
    assert rows["plain", False]["peak_bytes"] < matrix


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
    words = ["--lengths", "8", "--tokens", "8", "--tables", "frozen", "--no-memory"]
    words += [*HEADS, "--head_dim", "136", "--ways", "triton"]
    row = rows_of(bench_attention, tmp_path / "rows.json", words, status=1)["triton, frozen", True]
    assert "triton" in row["reason"]
    assert row["ratios"] == []


def test_steps_and_evaluations_are_measured_against_the_first_and_traced(tmp_path, capsys):
    words = [*MODEL, "--encodings", "rotary", "learned", "cable", "--length", "300"]
    words += ["--batch", "2", "--no-memory", "--trace", str(tmp_path / "trace.json.gz")]
    rows = rows_of(bench_step, tmp_path / "rows.json", words, status=1)
    printed = capsys.readouterr().out
    assert {name for name, _ in rows} == {"rotary", "learned", "cable"}
    refused = rows.pop(("learned", False))
    assert refused["ms"] == []
    assert f"| {refused['reason']} |" in printed
    for (_, training), row in rows.items():
        assert row["reason"] is None
        assert (row["batch"], row["length"]) == ((2, 16) if training else (1, 300))
        tokens = row["batch"] * row["length"]
        assert row["tokens_per_second"] == pytest.approx(tokens / median(row["ms"]) * 1000)
        # PaLM: 2 operations for each weight (12 hidden² a layer), 4 * hidden * length for scores.
        forward = 2 * (2 * 12 * 32**2 + 32 * 40) + 2 * 4 * 32 * row["length"]
        assert row["flops"] == tokens * forward * (3 if training else 1)
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert "Self CPU" in printed


def test_a_step_trains_the_weights_and_the_encoding_whose_turn_it_is_alone():
    model = Architecture(hidden_size=32, num_layers=2, num_attention_heads=4, seq_length=16)
    sizes = (model, 40, "cpu", False)
    calls = [bench_step.prepared(name, {}, True, 3, sizes, 16) for name in ("kerple_log", "t5")]
    gpt, _ = bench_step.trunk(*sizes)
    encodings = []
    for call in calls:
        call()
        encodings.append(gpt.positions)
    parts = (gpt.layers, *encodings)

    def numbers():
        return [nn.utils.parameters_to_vector(part.parameters()).detach() for part in parts]

    before = numbers()
    calls[0]()
    changed = [not torch.equal(*pair) for pair in zip(before, numbers(), strict=True)]
    assert changed == [True, True, False]


def test_every_encoding_has_a_line_between_the_marks(tmp_path, monkeypatch):
    for name in REGISTRY:
        build(name, Shape(3, 8, 24, 16), **bench_step.options_in_file(name, 32))
    assert bench_step.options_in_file("learned", 32)["max_positions"] == 32
    monkeypatch.setattr(bench_step, "REGISTRY", SAMPLE)  # of each kind, to save time
    begin, end = bench_step.BEGIN, bench_step.END
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nan old table\n{end}\nafter\n")
    words = ["--encodings", "all", "--length", "32", "--rounds", "1", "--no-memory"]
    assert bench_step.main([*MODEL, *words, "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\n\n`python")
    assert text.endswith(f"\n{end}\nafter\n")
    assert "an old table" not in text
    for name in SAMPLE:
        assert f"| {name} |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rounds 0", "--rounds: '0' is not a whole number of at least 1"),
        ("--heads 5", "--hidden: 768 cannot be split over --heads 5"),
        ("--into README.md", "--into: README.md has not the lines '<!-- ta"),
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
