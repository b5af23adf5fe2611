"""Forty steps give the forks' losses and kernel parameters (tests/golden/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.config import load
from megatron.interop.reference import load_reference
from megatron.training.optimizer import learning_rate
from megatron.training.trainer import Trainer
from tests.interop.test_reference import write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "train"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
RECIPE = [
    *("num_layers=2", "hidden_size=72", "num_attention_heads=12", "seq_length=64"),
    f"train_iters={EXPECTED['steps']}",
    f"train_micro_batch_size_per_gpu={EXPECTED['batch']}",
    f"optimizer.params.lr={EXPECTED['lr']}",
    f"optimizer.params.betas={EXPECTED['betas']}",
    f"optimizer.params.eps={EXPECTED['eps']}",
    f"weight_decay={EXPECTED['weight_decay']}",
    f"gradient_clipping={EXPECTED['gradient_clipping']}",
    f"warmup={EXPECTED['warmup']}",
    f"lr_decay_iters={EXPECTED['lr_decay_iters']}",
    "lr_schedule=neox-2022",
]


@pytest.mark.parametrize("case", sorted(EXPECTED["loss"]))
def test_training_follows_the_reference(case, grid, tmp_path):
    config = load([], [*RECIPE, f"pos_emb={case}"])
    model, _ = load_reference(write_checkpoint(case, tmp_path), config)
    trainer = Trainer(config, model, grid)
    golden = load_file(GOLDEN / "batches.safetensors")
    learns = any(f"final/{case}/" in key for key in golden)
    steps = EXPECTED["steps"] if learns else 15
    losses = [trainer.train_step([batch.long()]).loss.item() for batch in golden["ids"][:steps]]
    assert losses == pytest.approx(EXPECTED["loss"][case][:steps], rel=2e-3)

    position = trainer.model.position
    names = {id(parameter): name for name, parameter in position.named_parameters()}
    learned, compared = position.learned(), set()
    for theirs, ours in position.reference():
        final = golden.get(f"final/{case}/rpe.{theirs}")
        if id(ours) in names and final is not None:
            compared.add(names[id(ours)])
            torch.testing.assert_close(
                learned[names[id(ours)]], final.reshape(ours.shape), rtol=2e-2, atol=2e-3
            )
    assert compared == (set(names.values()) if learns else set())


def test_the_schedule_is_the_references():
    config = load([], RECIPE)
    rates = [learning_rate(step, config.optimizer) for step in range(EXPECTED["steps"])]
    assert rates == pytest.approx(EXPECTED["lr_at_step"], rel=1e-12)
