"""What a training needs, and what cannot fit."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.training import fits
from tests.training.conftest import tiny

CPU = torch.device("cpu")


def needs(*words: str, ranks: int = 1) -> fits.TrainingNeeds:
    return fits.needs(load([], tiny("train_iters=1", *words)), 512, ranks)


def test_zero_divides_the_state_and_checkpoints_follow_what_is_kept():
    count = needs().parameters.whole
    fp32 = [needs(f"zero_optimization.stage={stage}", ranks=4).memory / count for stage in range(4)]
    assert fp32 == pytest.approx([16, 4 + 4 + 2, 4 + 1 + 2, 1 + 1 + 2], abs=0.01)
    assert needs("precision=bf16", ranks=4).memory / count == pytest.approx(2 + 2 + 3, abs=0.01)
    every = ["train_iters=100", "save_interval=10"]
    assert needs(*every).disk == 11 * 12 * count
    assert needs(*every, "keep_last_n_checkpoints=3").disk == 4 * 12 * count


def test_a_model_beyond_the_memory_is_refused_with_its_numbers(monkeypatch):
    monkeypatch.setattr(fits, "device_memory", lambda device: 15_000_000_000)
    monkeypatch.setattr(fits, "swap_memory", lambda: SimpleNamespace(total=10**9))
    for words, message in {
        "num_layers=1e9": (
            "num_layers = 1000000000, hidden_size = 32: 12,704,000,032,832 parameters and their"
            " optimizer need 407 TB or more in 2 process(es), and there are 16 GB of memory"
        ),
    }.items():
        config = load([], tiny("train_iters=1", words))
        with pytest.raises(UserError) as raised:
            fits.check_fits(config, 512, ranks=2, local_ranks=2, device=CPU)
        assert message in str(raised.value)
    fits.check_fits(load([], tiny("train_iters=1")), 512, ranks=2, local_ranks=2, device=CPU)
