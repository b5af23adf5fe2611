"""The gradient noise scale of McCandlish et al. 2018: its formula, its parts in every engine."""

import numpy as np
import pytest
import torch

from megatron.checkpoints.manifest import read_record
from megatron.parallel.grid import Grid
from megatron.training.loop import train
from megatron.training.noise_scale import NoiseScale
from tests.training.conftest import MODEL, records, settings, tiny

MEASURED = ["log_gradient_noise_scale=true", "gradient_noise_scale_n_batches=2"]
NAMES = ("noise_scale", "noise_trace", "gradient_square")


def test_one_group_is_the_papers_formula():
    """Equations A.2 and A.3 in numpy's float64, with the covariance's unbiased form beside them."""
    generator = np.random.default_rng(1)
    windows, steps, size = 6, 5, 40
    gradients = generator.normal(1, 2, (steps, size)).astype(np.float32)
    noise = NoiseScale(windows, steps, Grid(), on_cpu=True)
    for row in gradients:
        assert noise.numbers() == {}
        noise.add([torch.from_numpy(row[:7]).view(7, 1), torch.from_numpy(row[7:])])
    rows = gradients.astype(np.float64)
    small_batch, large_batch = windows, windows * steps
    small = np.mean(np.sum(rows**2, axis=1))
    large = np.sum(np.mean(rows, axis=0) ** 2)
    trace = (small - large) / (1 / small_batch - 1 / large_batch)
    square = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    assert noise.numbers() == pytest.approx(
        {"noise_scale": trace / square, "noise_trace": trace, "gradient_square": square}, rel=1e-6
    )
    # The same trace from the steps' sample variances: each step is a mean over `windows`.
    assert trace == pytest.approx(windows * rows.var(axis=0, ddof=1).sum(), rel=1e-9)


def test_a_group_with_a_gradient_that_is_not_finite_is_left_out():
    noise = NoiseScale(4, 2, Grid())
    for value in (1.0, float("nan"), float("inf"), 1.0):
        noise.add([torch.full((3,), value)])
    assert noise.numbers() == {}
    for value in (1.0, -1.0):
        noise.add([torch.tensor([value, 0.0])])
    assert noise.numbers()["noise_scale"] is None  # noise hides the gradient


def test_it_is_measured_without_a_change_of_any_loss_and_a_checkpoint_keeps_it(
    grid, corpus, tmp_path
):
    plain, measured, broken = (tmp_path / name for name in ("plain", "measured", "broken"))
    train(settings(corpus, plain), grid)
    train(settings(corpus, measured, *MEASURED), grid)
    before, after = records(plain), records(measured)
    for step in range(1, 9):
        assert before[step]["loss"] == after[step]["loss"]
        assert before[step]["grad_norm"] == after[step]["grad_norm"]
        assert set(NAMES) <= after[step].keys() or step == 1
    train(settings(corpus, broken, *MEASURED, "exit_interval=4"), grid)
    train(settings(corpus, broken, *MEASURED), grid)
    for name in NAMES:
        assert records(broken)[8][name] == after[8][name]
    assert read_record(measured / "global_step8")["noise_scale"]["groups"] == 4


@pytest.fixture(scope="module")
def reference(grid, corpus, tmp_path_factory) -> dict:
    """What one rank measures at stage 0 in float32, without dropout."""
    folder = tmp_path_factory.mktemp("reference")
    train(settings(corpus, folder, *MEASURED, "hidden_dropout=0", "train_iters=4"), grid)
    return records(folder)[4]


@pytest.mark.parametrize(
    "how",
    [
        ["zero_optimization.stage=2", "gradient_noise_scale_cpu_offload=true"],
        ["train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2", "precision=bf16"],
        ["precision=bf16", "zero_optimization.stage=3"],
    ],
    ids=["zero2", "bf16-accumulated", "bf16-zero3"],
)
def test_every_engine_measures_the_same(grid, corpus, tmp_path, reference, how):
    train(settings(corpus, tmp_path, *MEASURED, "hidden_dropout=0", "train_iters=4", *how), grid)
    for name in NAMES:
        rel = 0.02 if "precision=bf16" in how else 1e-4
        assert records(tmp_path)[4][name] == pytest.approx(reference[name], rel=rel)


@pytest.mark.distributed
def test_two_ranks_measure_what_one_does(forks, corpus, tmp_path, reference):
    words = tiny(*MODEL, *MEASURED, "hidden_dropout=0", "train_iters=4")
    words.append("zero_optimization.stage=3")
    words += [f"data_path={corpus}", f"save={tmp_path / 'run'}", "train_micro_batch_size_per_gpu=2"]
    forks.run_ranks(2, "train.py", *words, log=tmp_path / "log")
    for name in NAMES:
        assert records(tmp_path / "run")[4][name] == pytest.approx(reference[name], rel=1e-4)
