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
    return fits.needs(load([], tiny("train_iters=1", *words)), 512, ranks, CPU)


def test_zero_divides_the_state_and_checkpoints_follow_what_is_kept():
    count = needs().parameters.whole
    fp32 = [needs(f"zero_optimization.stage={stage}", ranks=4).state / count for stage in range(4)]
    assert fp32 == pytest.approx([16, 4 + 4 + 2, 4 + 1 + 2, 1 + 1 + 2], abs=0.01)
    assert needs("precision=bf16", ranks=4).state / count == pytest.approx(2 + 2 + 3, abs=0.01)
    every = ["train_iters=100", "save_interval=10"]
    assert needs(*every).disk == 11 * 12 * count
    assert needs(*every, "keep_last_n_checkpoints=3").disk == 4 * 12 * count


@pytest.mark.parametrize(
    ("kind", "numbers", "shared"), [("gated_delta", 28, 5), ("kda", 58, 12), ("mla", 5, 0)]
)
def test_a_layer_with_a_state_or_latents_keeps_what_these_are_read_for(kind, numbers, shared):
    """So many numbers of the heads' width for each token beyond attention, in one layer of two."""
    tokens, pattern = 4 * 64, [f"layers=[{kind}, attention]"]
    pattern += ["qk_rope_head_dim=8"] if kind == "mla" else []
    for words in ([], ["checkpoint_activations=true"]):
        plain, hybrid = needs(*words), needs(*words, *pattern)
        assert hybrid.activations - plain.activations == 4 * tokens * numbers * 32
    words = ["context_parallel_size=2"]
    beyond = needs(*words, *pattern).activations - needs(*words).activations
    assert beyond == 4 * tokens // 2 * (numbers + shared) * 32


def test_a_model_beyond_the_memory_is_refused_with_its_numbers(monkeypatch):
    monkeypatch.setattr(fits, "device_memory", lambda device: 15_000_000_000)
    monkeypatch.setattr(fits, "swap_memory", lambda: SimpleNamespace(total=10**9))
    for words, message in {
        "num_layers=1e9": (
            "num_layers = 1000000000, hidden_size = 32, seq_length = 64,"
            " train_micro_batch_size_per_gpu = 4: 12,704,000,032,832 parameters and what a step"
            " keeps need 964 TB or more in 2 process(es), and there are 16 GB of memory - lower"
            " them, make_vocab_size_divisible_by or the encoding's options"
        ),
        "seq_length=16777216": "58,240 parameters and what a step keeps need 326 GB or more in 2",
    }.items():
        config = load([], tiny("train_iters=1", words))
        with pytest.raises(UserError) as raised:
            fits.check_fits(config, 512, ranks=2, local_ranks=2, device=CPU)
        assert message in str(raised.value)
    fits.check_fits(load([], tiny("train_iters=1")), 512, ranks=2, local_ranks=2, device=CPU)
