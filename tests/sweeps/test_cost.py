"""What a sweep costs: operations of the model, windows of the protocols, time, disk."""

import re

import pytest

from megatron.sweeps.cells import State, load_sweep
from megatron.sweeps.cost import (
    DEVICES,
    cost,
    forward_flops,
    hours,
)
from megatron.training.metrics import peak_of
from tests.support import ROOT
from tools.sweep import absent_data, plan

TEXT = """
settings: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32,
  data_path: text, train_iters: 10, precision: bf16}
grid: {seed: [1, 2]}
"""
HALF, TRAINED, DONE = State("stopped", step=5), State("trained", step=10), State("done", step=10)


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(TEXT)
    return load_sweep(path, tmp_path / "runs")


def test_the_cost_is_of_what_is_missing(sweep):
    tokens = 5 * 4 * 32  # steps, windows, length
    flops = 3 * tokens * forward_flops(sweep.cells[0].config, 50304, 32)
    assert cost(sweep, [HALF, DONE]) == (tokens, {"bf16": flops}, {})
    assert cost(sweep, [DONE, DONE]) == (0, {"bf16": 0}, {})


def test_a_task_costs_its_own_vocabulary_and_windows_and_lacks_no_data(tmp_path):
    path = tmp_path / "mine.yml"
    task = "data_path: task:word_problem, task_args: {group: S3}, make_vocab_size_divisible_by: 8"
    options = "{windows: 6, lengths: [32, 64], eval_tokens: 40}"  # too few for a text
    path.write_text(f"{TEXT.replace('data_path: text', task)}evaluate: {{answers: {options}}}")
    mine = load_sweep(path, tmp_path / "runs")
    config, states = mine.cells[0].config, [State("waiting"), DONE]
    per_token = [forward_flops(config, 8, length) for length in (32, 64)]  # S3 has six elements
    trained = State("trained", step=10, missing=tuple(mine.cells[0].evaluations))
    answers = 6 * 32 * per_token[0] + 6 * 64 * per_token[1]
    assert cost(mine, [trained, DONE]) == (0, {"bf16": 0}, {"fp32": answers})
    training = {"bf16": 3 * 10 * 4 * 32 * per_token[0]}
    assert cost(mine, states) == (10 * 4 * 32, training, {})
    assert not absent_data(mine, states)


def test_a_plan_can_be_priced_for_another_device(sweep):
    assert "hours on 4 x h200, 0.00 to train" in plan(sweep, [HALF, DONE], 4, "h200")
    assert hours({"bf16": 0.35 * 125e12 * 3600}, "v100") == pytest.approx(1)  # it has no bf16
    local_plan = plan(sweep, [HALF, DONE], 2, None)
    assert local_plan.endswith("not included: downloads, tokenising, memory and disk")
    assert not absent_data(sweep, [DONE, DONE])


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ("", "", 19.5),
        ("float32_matmul_precision: high, ", "", 156),
        ("float32_matmul_precision: high, ", "dtype: bf16, ", 312),
    ],
)
def test_an_evaluation_takes_the_time_of_the_products_that_it_computes(
    tmp_path, settings, options, expected
):
    """TFLOP/s by NVIDIA's data sheet of an A100; training computes in bf16 in all three."""
    path = tmp_path / "mine.yml"
    text = TEXT.replace("settings: {", f"settings: {{{settings}")
    path.write_text(f"{text}evaluate: {{far: {{{options}lengths: [32], eval_tokens: 64}}}}")
    mine = load_sweep(path, tmp_path / "runs")
    state = State("waiting", missing=tuple(mine.cells[0].evaluations))
    _, training, evaluation = cost(mine, [state, DONE])
    flops = 64 * forward_flops(mine.cells[0].config, 50304, 32)
    assert hours(evaluation, "a100", 1) == pytest.approx(flops / (expected * 1e12) / 3600)
    flops = 3 * 10 * 4 * 32 * forward_flops(mine.cells[0].config, 50304, 32)
    assert hours(training, "a100", 1) == pytest.approx(flops / 312e12 / 3600)


@pytest.mark.docs
def test_the_hours_that_pages_show_are_those_of_the_command(tmp_path):
    def shown_by(name, device="a100"):
        sweep = load_sweep(name, tmp_path)
        states = [State("waiting", missing=cell.evaluations) for cell in sweep.cells]
        (shown,) = re.findall(r"^time: ([\d,.]+)", plan(sweep, states, 1, device), re.M)
        return float(shown.replace(",", ""))

    papers = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `S ([\w.]+)`.*?\| ([\d,]+) \| [\d,]+ GB", papers)
    rows += [("kerple_one", *re.findall(r"about (\d+) hours of one A100", papers))]
    assert len(rows) == 14
    for name, printed in rows:
        assert round(shown_by(name)) == int(printed.replace(",", "")), name
    questions = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
    for printed, device in re.findall(r"([\d.]+) hours of one ([AH]100)", questions):
        assert f"{shown_by('kerple_table3', device.lower()):.1f}" == printed


def test_every_device_that_can_be_named_has_a_peak_in_the_table_of_training():
    for name, called in DEVICES.items():
        flops = 3600e12 * (peak_of(called, "fp32") or 0)
        assert hours({"fp32": flops}, name, 1) == pytest.approx(1)
