"""Schedules at their ends and in between, and steps of Muon."""

import math

import pytest
import torch

from megatron.config import load
from megatron.config.schedules import SHAPES
from megatron.model import from_config
from megatron.training.optimizer import learning_rate
from tests.training.conftest import VOCAB, text, trainer

SHAPE = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8"]


def rates(*settings: str, steps: int = 1000) -> list[float]:
    words = ["train_iters=1000", "optimizer.params.lr=1.0", "warmup=0.1", *settings]
    optimizer = load([], [*SHAPE, *words]).optimizer
    return [learning_rate(step, optimizer) for step in range(steps)]


@pytest.mark.parametrize("style", ["cosine", "linear"])
def test_the_standard_schedule_never_wastes_a_step(style):
    sequence = rates(f"lr_decay_style={style}", "min_lr=0.01")
    assert sequence[0] == pytest.approx(0.01)
    assert sequence[99] == pytest.approx(1.0) == max(sequence)
    assert sequence[549] == pytest.approx(0.505, abs=2e-3)  # half way between peak and floor
    assert sequence[-1] == pytest.approx(0.01, abs=2e-3)
    assert sequence[100:] == sorted(sequence[100:], reverse=True)
    assert len(set(sequence[100:])) == 900


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_falls_from_one_to_zero(name):
    """A schedule of another form, such as one without an end, belongs to `learning_rate`."""
    assert SHAPES[name](0.0) == 1
    assert SHAPES[name](1.0) == (1 if name == "constant" else 0)


def test_constant_stays_at_its_peak():
    assert set(rates("lr_decay_style=constant", "warmup=0")) == {1.0}


@pytest.mark.parametrize("warmup", [0.1, 0.7, 0])
def test_the_schedule_of_2022_has_its_floor_after_the_warm_up_alone(warmup):
    """AnnealingLR.get_lr of GPT-NeoX at 738b87e: a warm-up from 0 returns before the floor."""
    sequence = rates("lr_schedule=neox-2022", "min_lr=0.3", f"warmup={warmup}")
    rising = int(1000 * warmup)
    for step, rate in enumerate(sequence):
        reached = min(step, 1000 - rising)
        if rising and step <= rising:
            expected = reached / rising
        else:
            expected = max(0.3, (math.cos(math.pi * (reached - rising) / 1000) + 1) / 2)
        assert rate == pytest.approx(expected), step


def test_wsd_stays_at_its_peak_and_decays_by_the_shapes_of_megatron_lm():
    stable = rates("lr_decay_style=wsd")
    assert set(stable[99:]) == {1.0}
    halves = {"linear": 0.5, "cosine": 0.5, "exponential": 2 * 0.5**0.5 - 1}
    halves["minus_sqrt"] = 1 - 0.5**0.5
    for style, half in halves.items():
        words = ["lr_decay_style=wsd", "lr_wsd_decay_iters=199", f"lr_wsd_decay_style={style}"]
        sequence = rates(*words)
        assert sequence[:801] == stable[:801]
        assert sequence[801] < 1
        assert sequence[900] == pytest.approx(half)  # the 100th of 199 steps, and the 200th has 0
        assert sequence[801:] == sorted(sequence[801:], reverse=True)


MATRICES = {
    "query_key_value.weight",
    "gate.weight",
    "0.weight",  # of decay and gate in kda
    "1.weight",
    "dense.weight",
    "dense_h_to_4h.weight",
    "dense_4h_to_h.weight",
}
TABLES_OF_LAYERS = ("beta_decay.weight", "beta.weight", "convolution.weight")


def test_muon_takes_the_steps_of_torch_for_the_layers_matrices_and_adam_those_of_the_rest(grid):
    words = ["pos_emb=mep_param", "optimizer.type=Muon", "optimizer.params.momentum=0.9"]
    words += [
        "layers=[gated_delta, attention, kda]",
        "num_layers=3",
        "lr_decay_style=constant",
        "warmup=0",
        "weight_decay=0.1",
        "gradient_clipping=0",
    ]
    run = trainer(grid, *words)
    plain = from_config(run.config, VOCAB)
    plain.load_state_dict(run.model.state_dict())

    by_kind: dict[str, list[torch.Tensor]] = {"matrices": [], "tables": [], "rest": []}
    for name, parameter in plain.named_parameters():
        is_table = name in ("word_embeddings.weight", "final_linear.weight")
        is_table = is_table or name.endswith(TABLES_OF_LAYERS)
        is_matrix = ".".join(name.split(".")[-2:]) in MATRICES
        kind = "tables" if is_table else "matrices" if is_matrix else "rest"
        by_kind[kind].append(parameter)
    assert len(by_kind["matrices"]) == 17
    optimizers = [
        torch.optim.Muon(
            by_kind["matrices"],
            lr=3e-3,
            momentum=0.9,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(by_kind["tables"], lr=3e-3, weight_decay=0.1, fused=True),
        torch.optim.AdamW(by_kind["rest"], lr=3e-3, weight_decay=0.0, fused=True),
    ]
    for batch in text(3):
        loss = run.train_step([batch]).loss
        expected = plain(batch[:, :-1], labels=batch[:, 1:], mean=True)
        expected.backward()
        assert loss == expected
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in plain.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight), name
