"""What a sweep costs: operations of the model, windows of the protocols, time, disk."""

import pytest

from megatron.sweeps.cells import State, load_sweep
from megatron.sweeps.cost import (
    DEVICES,
    cost,
    forward_flops,
    peak_tflops,
)
from megatron.training.metrics import peak_of
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
    assert cost(sweep, [HALF, DONE]) == (tokens, flops)
    assert cost(sweep, [DONE, DONE]) == (0, 0)


def test_a_task_costs_its_own_vocabulary_and_windows_and_lacks_no_data(tmp_path):
    path = tmp_path / "mine.yml"
    task = "data_path: task:word_problem, task_args: {group: S3}, make_vocab_size_divisible_by: 8"
    options = "{windows: 6, lengths: [32, 64], eval_tokens: 40}"  # too few for a text
    path.write_text(f"{TEXT.replace('data_path: text', task)}evaluate: {{answers: {options}}}")
    mine = load_sweep(path, tmp_path / "runs")
    config, states = mine.cells[0].config, [State("waiting"), DONE]
    per_token = [forward_flops(config, 8, length) for length in (32, 64)]  # S3 has six elements
    trained = State("trained", step=10, missing=tuple(mine.cells[0].evaluations))
    assert cost(mine, [trained, DONE]) == (0, 6 * 32 * per_token[0] + 6 * 64 * per_token[1])
    assert cost(mine, states) == (10 * 4 * 32, 3 * 10 * 4 * 32 * per_token[0])
    assert not absent_data(mine, states)


def test_a_plan_can_be_priced_for_another_device(sweep):
    text = plan(sweep, [HALF, DONE], None, "a100")
    assert "on 1 x a100 (assumed: 35% of 312 TFLOP/s, its data sheet's peak)" in text
    assert "on 4 x h200 (assumed: 35% of 989 TFLOP/s" in plan(sweep, [HALF, DONE], 4, "h200")
    # A V100 has no bf16.
    assert "35% of 125 TFLOP/s, its data sheet's peak" in plan(sweep, [HALF, DONE], 1, "v100")
    local_plan = plan(sweep, [HALF, DONE], 2)
    assert local_plan.endswith("not counted: downloads, tokenising, memory and disk")
    assert not absent_data(sweep, [DONE, DONE])


def test_every_device_that_can_be_named_has_a_peak_in_the_table_of_training():
    for name, called in DEVICES.items():
        assert peak_tflops(name, "fp32") == peak_of(called, "fp32")
