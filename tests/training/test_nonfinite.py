"""A loss or a gradient that is not finite: skipped where that is allowed, else the run stops."""

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import latest_step
from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.training import run
from megatron.training.checkpoint import full_weights
from megatron.training.trainer import Trainer
from tests.training.conftest import MODEL, records, tiny

VOCAB = 61
POISON = 60
"""A token whose embedding is so large that its square is infinite: its window's loss is NaN."""


def poisoned(config, vocab, end_of_document=None):
    """A model that is sound as long as it does not meet the token POISON."""
    model = from_config(config, vocab, end_of_document)
    with torch.no_grad():
        model.word_embeddings.weight[POISON] = 3e38
    return model


def batches(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return list(torch.randint(POISON, (count, 4, 65), generator=draw))


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, exact and logged numbers of the encoding, and the optimizer's averages."""
    found = {name: weight.clone() for name, weight in full_weights(trainer.engine).items()}
    for name, values in trainer.model.learned().items():
        found[f"learned {name}"] = values.clone()
    for module, name, _ in trainer.model.position.own_parameters():
        if name in module.exact:
            found[f"exact {name}"] = module.exact[name].clone()
    optimizer = trainer.engine.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # that which ZeRO wraps
    for index, averages in enumerate(optimizer.state.values()):
        for name, value in averages.items():
            found[f"{index}.{name}"] = torch.as_tensor(value).clone()
    return found


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["precision=bf16"],
        ["precision=bf16", "zero_optimization.stage=2"],
        ["precision=bf16", "zero_optimization.stage=3"],
    ],
    ids=["fp32", "bf16", "bf16-zero2", "bf16-zero3"],
)
def test_a_skipped_step_changes_nothing_but_the_count_of_steps(grid, how):
    words = ["pos_emb=mep_param", "skip_nonfinite=2", "gradient_accumulation_steps=2", *how]
    config = load([], tiny("train_iters=100", *words))
    trainer = Trainer(config, poisoned(config, VOCAB), grid)
    assert not trainer.train_step(batches(2))["skipped"]
    before = state(trainer)
    good, bad = batches(2)
    bad[2, 7] = POISON
    result = trainer.train_step([bad, good])
    assert result["skipped"]
    assert not result["loss"].isfinite()
    after = state(trainer)
    assert trainer.step == 2
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name

    result = trainer.train_step(batches(2))
    assert not result["skipped"]
    assert result["loss"].isfinite()
    assert any(not torch.equal(value, after[name]) for name, value in state(trainer).items())


def test_without_skip_nonfinite_no_step_reports_that_it_was_skipped(grid):
    config = load([], tiny("train_iters=100", "pos_emb=mep_param"))
    trainer = Trainer(config, poisoned(config, VOCAB), grid)
    bad = batches(1)[0]
    bad[0, 0] = POISON
    result = trainer.train_step([bad])
    assert not result["skipped"]
    assert not result["loss"].isfinite()


def settings(letters, folder, *more: str):
    paths = [f"data_path={letters}", f"save={folder}", f"load={folder}"]
    shape = ["train_micro_batch_size_per_gpu=2", "split=[1, 0, 0]"]
    return load([], tiny(*paths, *shape, *MODEL, *more))


def train(config, grid, monkeypatch):
    monkeypatch.setattr("megatron.training.run.from_config", poisoned)
    return run.train(config, grid)


def test_the_message_names_step_and_documents_and_nothing_is_saved_from_there(
    grid, letters, tmp_path, monkeypatch
):
    config = settings(letters, tmp_path, "train_iters=24", "save_interval=2", "log_interval=50")
    with pytest.raises(UserError) as fault:
        train(config, grid, monkeypatch)
    message = str(fault.value)
    assert message.startswith("loss: nan at step ")
    step = int(message.split("at step ")[1].split()[0])
    assert "- lower optimizer.params.lr, raise warmup, or set skip_nonfinite\n" in message
    samples, documents = message.split("rank 0 had samples ")[1].split(" of documents ")
    assert samples == f"{2 * step - 2}, {2 * step - 1}"
    assert {"3", "7"} & set(documents.split(", "))
    last = latest_step(tmp_path)
    assert last is None or last < step


def test_skipped_steps_are_counted_and_recorded_and_the_count_survives_resuming(
    grid, letters, tmp_path, monkeypatch
):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    words = ["train_iters=24", "skip_nonfinite=9", "log_interval=4"]
    train(settings(letters, straight, *words), grid, monkeypatch)
    skipped = records(straight, "skipped")
    assert skipped
    for step, record in skipped.items():
        (batch,) = record["batch"]
        assert batch["samples"] == [2 * step - 2, 2 * step - 1]
        assert {3, 7} & set(batch["documents"])
    counts = [record["skipped"] for record in skipped.values()]
    assert counts == list(range(1, len(skipped) + 1))
    meta = read_record(straight / "global_step24")
    assert meta["skipped"] == len(skipped)
    assert all(record["loss"] is not None for record in records(straight).values())

    part = f"exit_interval={min(skipped)}"
    train(settings(letters, broken, *words, part), grid, monkeypatch)
    train(settings(letters, broken, *words), grid, monkeypatch)
    assert records(broken, "skipped") == skipped
    weights = load_file(broken / "global_step24" / "model.safetensors")
    for name, weight in load_file(straight / "global_step24" / "model.safetensors").items():
        assert torch.equal(weights[name], weight), name
    assert read_record(broken / "global_step24")["skipped"] == len(skipped)


def test_more_skipped_steps_than_allowed_stop_the_run(grid, letters, tmp_path, monkeypatch):
    words = ["train_iters=40", "skip_nonfinite=1", "log_interval=100"]
    with pytest.raises(UserError) as fault:
        train(settings(letters, tmp_path, *words), grid, monkeypatch)
    message = str(fault.value)
    assert ", and 1 steps were skipped before it (skip_nonfinite: 1) - lower" in message
    assert len(records(tmp_path, "skipped")) == 1


def test_a_validation_that_is_not_finite_stops_the_run_before_anything_is_overwritten(
    grid, letters, tmp_path, monkeypatch
):
    words = ["train_iters=4", "save_interval=2", "eval_interval=4", "eval_iters=20"]
    good_part = "split=[3, 9, 0]"  # documents 3 and 7 are validated on
    with pytest.raises(UserError) as fault:
        train(settings(letters, tmp_path, *words, good_part), grid, monkeypatch)
    assert str(fault.value) == (
        "validation: its loss is nan at step 4, no checkpoint of this step is written"
        " - continue from an earlier one with a lower optimizer.params.lr"
    )
    assert latest_step(tmp_path) == 2
