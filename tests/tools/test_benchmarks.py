"""The benchmarks on tiny sizes: what they compute and write, never how fast it was."""

import json
import math
from statistics import median

import attention as bench_attention
import pytest
import step as bench_step
import torch
from attention import forks
from measure import ready
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.positions import REGISTRY, Shape, build
from tests.encodings import SAMPLE

CPU = ["--device", "cpu", "--threads", "1", "--rounds", "3"]
SIZE = {"hidden": 32, "layers": 2, "heads": 4, "vocab": 40, "train_length": 16}
MODEL = [word for name, size in SIZE.items() for word in (f"--{name}", str(size))]


def test_every_way_is_measured_beside_plain_attention_with_its_conditions(tmp_path, capsys):
    words = ["--lengths", "24", "--tokens", "48", "--dtypes", "float32", "--no-memory"]
    words += ["--heads", "2", "--head_dim", "8", "--ways", "rotary", "path"]
    words += ["forks", "eager", "sdpa"]
    words += ["--output", str(tmp_path / "found.json")]
    assert bench_attention.main([*CPU, *words]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"command", "date", "commit", "hardware", "threads"} <= found["conditions"].keys()
    rows = {(row["candidate"], row["backward"]): row for row in found["rows"]}
    kinds = bench_attention.BIASES
    ours = {f"{backend}, {kind}" for backend in ("eager", "sdpa") for kind in kinds}
    names = {"plain", "rotary", "path", "forks"} | ours
    assert {name for name, backward in rows if backward} == names
    assert {name for name, backward in rows if not backward} == {
        name for name in names if not name.endswith("learned")
    }
    for (_, backward), row in rows.items():
        reference = rows["plain", backward]["ms"]
        assert (row["reason"], row["reference"], len(row["ms"])) == (None, "plain", 3)
        ratios = [mine / theirs for mine, theirs in zip(row["ms"], reference, strict=True)]
        assert row["median_ms"] == median(row["ms"])
        assert row["median_ratio"] == pytest.approx(median(ratios))
    printed = capsys.readouterr().out
    assert (tmp_path / "found.md").read_text() == f"<!-- by tools/bench -->\n\n{printed}"
    assert "| sdpa, frozen | 2 x 24 |" in printed


def test_a_dense_way_takes_its_matrices(tmp_path):
    words = ["--lengths", "1024", "--tables", "frozen", "--ways", "eager"]
    words += ["--heads", "2", "--head_dim", "8", "--dtypes", "float32"]
    output = tmp_path / "found.json"
    assert bench_attention.main([*CPU, *words, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    peaks = {row["candidate"]: row["peak_bytes"] for row in rows if not row["backward"]}
    matrix = 2 * 1024**2 * 4
    assert peaks.keys() == {"plain", "eager, frozen"}
    assert peaks["plain"] < matrix < 2 * matrix < peaks["eager, frozen"]


def test_the_forks_way_is_the_papers_formula():
    length = 40
    q, k, v = torch.randn(3, 2, 3, length, 8, dtype=torch.float64)
    p, a = torch.rand(2, 3, 1, 1, dtype=torch.float64)
    index = torch.arange(length)
    distance = (index[:, None] - index).tril().double()
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(8) - p * torch.log1p(a * distance)
    probabilities = scores.masked_fill(index[:, None] < index, -torch.inf).softmax(-1)
    found = forks(q, k, v, p, a, distance, index[:, None] < index)
    torch.testing.assert_close(found, probabilities @ v, rtol=1e-10, atol=1e-10)


def test_what_cannot_run_has_a_reason_and_a_way_that_is_asked_for_fails():
    huge = bench_attention.Candidate("eager", "frozen", False, "float32", 2**21, 1, 12, 64, "cpu")
    unknown = bench_attention.Candidate("no_way", "frozen", False, "float32", 8, 1, 2, 8, "cpu")
    calls, reasons = ready([huge, unknown])
    assert not calls
    assert reasons[huge.name] == f"not run: needs {huge.needs / 2**30:.1f} GiB"
    assert reasons[unknown.name].startswith("not run: attention_backend: 'no_way' is not known")
    small = ["--lengths", "8", "--tokens", "8", "--heads", "1", "--no-memory", "--rounds", "1"]
    too_wide = ["--dtypes", "float32", "--tables", "frozen", "--head_dim", "136"]
    assert bench_attention.main([*CPU, *small, *too_wide, "--ways", "triton"]) == 1
    assert bench_attention.main([*CPU, *small, *too_wide, "--ways", "rotary"]) == 0


def test_steps_and_evaluations_are_measured_against_rotary_and_traced(tmp_path, capsys):
    words = [
        "--encodings",
        "rotary",
        "learned",
        "cable",
        "--eager",
        "kerple_log",
        "--length",
        "300",
    ]
    words += [*CPU, *MODEL, "--batch", "2", "--no-memory", "--output", str(tmp_path / "found.json")]
    assert bench_step.main([*words, "--trace", str(tmp_path / "trace.json.gz")]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    rows = {(row["candidate"], row["training"]): row for row in rows}
    names = {f"{name}, auto" for name in ("rotary", "learned", "cable")}
    assert {name for name, _ in rows} == names | {"kerple_log, eager"}
    refused = rows.pop(("learned, auto", False))
    assert (refused["ms"], refused["tokens_per_second"]) == ([], None)
    assert f"| {refused['reason']} |" in printed
    for (_, training), row in rows.items():
        assert row["reason"] is None
        assert (row["batch"], row["length"]) == ((2, 16) if training else (1, 300))
        tokens = row["batch"] * row["length"]
        assert row["tokens_per_second"] == pytest.approx(tokens / median(row["ms"]) * 1000)
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert "Self CPU" in printed


def candidate(**more):
    values = {"pos_emb": "kerple_log", "backend": "eager", "training": True, "length": 16}
    size = bench_step.Size(**SIZE, dtype="float32", device="cpu")
    return bench_step.GPTCandidate(**{**values, "batch": 3, "size": size, **more})


@pytest.mark.parametrize("training", [False, True])
def test_palms_operations_are_those_that_torch_counts_on_the_dense_way(training):
    one = candidate(training=training)
    call = one.prepare()
    with FlopCounterMode(display=False) as counter:
        call()
    assert one.flops == counter.get_total_flops()


def test_a_step_trains_the_weights_and_the_encoding_whose_turn_it_is_alone():
    calls = [candidate(pos_emb=name).prepare() for name in ("kerple_log", "t5")]
    model, _ = bench_step.trunk(candidate().size, candidate().architecture)
    encodings = []
    for call in calls:
        call()
        encodings.append(model.positions)
    parts = (model.layers, *encodings)

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
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert "not run" not in line
        assert "failed" not in line


def test_a_bad_argument_is_one_message(capsys):
    for tool, words, message in (
        (bench_attention, "--output README.txt", "--output: README.txt does not end in .json"),
        (bench_step, "--device cuda", "--device: torch finds no CUDA device; use --device"),
        (bench_step, "--rounds 0", "--rounds: '0' is not a whole number of at least 1"),
        (bench_step, "--heads 5", "--hidden: 768 cannot be split over --heads 5"),
        (bench_step, "--into nowhere.md", "--into: nowhere.md cannot be read (No such"),
        (bench_step, "--into README.md", "--into: README.md has not the lines '<!-- ta"),
    ):
        try:
            status = tool.main(words.split())
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        assert status in (1, 2)
        assert printed.err.count(message) == 1
        assert not printed.out
