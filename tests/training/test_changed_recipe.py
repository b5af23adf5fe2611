"""A resumed run computes with the optimizer's settings of its own configuration."""

import math

import pytest
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from safetensors.torch import load_file

from megatron.training.optimizer import continue_scale
from megatron.training.run import train
from tests.training.conftest import records, settings

FIRST = ["optimizer.params.betas=[0.9, 0.95]", "weight_decay=0.3", "gradient_clipping=1.0"]
RATE, DECAY, NORM = 1.0, 0.02, 0.02
# Without averages, and with eps and rate so large, a step is the clipped gradient.
THEN = [
    "optimizer.params.betas=[0.0, 0.0]",
    f"optimizer.params.eps={RATE}",
    f"optimizer.params.lr={RATE}",
    "lr_decay_style=constant",
    "warmup=0",
    f"weight_decay={DECAY}",
    f"gradient_clipping={NORM}",
]


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["precision=bf16", "zero_optimization.stage=1"],
        ["zero_optimization.stage=3"],
    ],
    ids=["fp32", "bf16-zero1", "zero3"],
)
def test_a_step_after_a_resume_decays_and_clips_as_the_new_configuration_says(
    grid, corpus, tmp_path, how
):
    """The whole change of the weights, without their decay, has the norm of the clipped gradient.

    AdamW with betas 0: w - lr * (decay * w + g / (|g| + eps)); exempt are norms, biases and what
    the encoding learns.
    """
    save = ["save_interval=1", *how]
    train(settings(corpus, tmp_path, "train_iters=2", *FIRST, *save), grid)
    train(settings(corpus, tmp_path, "train_iters=3", *THEN, *save), grid)
    assert records(tmp_path)[3]["grad_norm"] > NORM
    before = load_file(tmp_path / "global_step2" / "model.safetensors")
    after = load_file(tmp_path / "global_step3" / "model.safetensors")
    total = 0.0
    for name, weight in before.items():
        decays = weight.dim() >= 2 and not name.startswith("positions.")
        kept = 1 - RATE * DECAY if decays else 1
        gradient = weight.double() * kept - after[name].double()
        total += gradient.square().sum().item()
    assert math.sqrt(total) == pytest.approx(NORM, rel=0.02)


def test_a_loss_scale_goes_on_where_it_was_with_the_settings_of_the_new_configuration():
    loaded = DynamicLossScaler(2.0**16, 1000, 1.0, 3, True)
    for overflow in (False, True, False):
        loaded.update_scale(overflow)
    here = DynamicLossScaler(2.0**8, 50, 2.0, 2, False)
    continue_scale(here, loaded)
    assert (here.cur_scale, here.cur_iter, here.last_overflow_iter) == (2.0**16, 3, 1)
    assert (here.scale_window, here.min_scale, here.cur_hysteresis) == (50, 2.0, 2)

    fixed = LossScaler(128.0)
    continue_scale(fixed, loaded)
    assert fixed.cur_scale == 128.0
