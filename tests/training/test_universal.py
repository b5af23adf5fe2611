"""A checkpoint continues with other ranks, another ZeRO stage and another precision."""

from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from megatron.checkpoints.manifest import read_record, write_record
from megatron.checkpoints.read import read_meta
from megatron.checkpoints.saved import latest_step
from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.training import checkpoint
from megatron.training.run import train
from megatron.training.trainer import Trainer
from megatron.training.universal import AVERAGES, Engine
from tests.training.conftest import copy_of, records, settings, tiny

ON_TWO: dict[str, tuple[int, str | None]] = {
    # name: (ZeRO stage, the run whose step 4 it continues)
    "two-2": (2, None),
    "two-2-again": (2, "two-2"),
    "one-on-two-3": (3, "one"),
}
"""Runs on two ranks. tests/faults/universal.py has every pair of engines."""


def recipe(corpus: Path, save: Path, stage: int, *more: str, source: Path | None = None):
    """Eight windows a step on one rank, in two micro batches."""
    words = [
        "pos_emb=mep_param",
        "train_iters=8",
        "save_interval=4",
        "gradient_accumulation_steps=2",
        f"zero_optimization.stage={stage}",
        f"data_path={corpus}",
        f"save={save}",
    ]
    if source is not None:
        words.append(f"load={source / 'global_step4'}")
    return tiny(*words, *more)


def losses(folder: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in records(folder).items() if step > 4}


@pytest.fixture(scope="module")
def folder(grid, forks, corpus, tmp_path_factory) -> Path:
    """Folders of a run on one rank, called one, and of ON_TWO."""
    root = tmp_path_factory.mktemp("ranks")
    train(load([], recipe(corpus, root / "one", 0)), grid)
    for name, (stage, source) in ON_TWO.items():
        path = None if source is None else root / source
        words = recipe(corpus, root / name, stage, "gradient_accumulation_steps=1", source=path)
        log = root / f"{name}.log"
        pids = forks.start_ranks(2, "train.py", *words, log=log)
        assert not any([forks.wait(pid) for pid in pids]), log.read_text()
    return root


@pytest.mark.campaign
@pytest.mark.distributed
def test_two_ranks_resumed_repeat_the_uninterrupted_ones_to_the_last_bit(folder):
    expected = losses(folder / "two-2")
    assert expected.keys() == {5, 6, 7, 8}
    assert losses(folder / "two-2-again") == expected


@pytest.mark.campaign
@pytest.mark.distributed
def test_a_checkpoint_of_one_rank_continues_on_two(folder):
    expected = losses(folder / "one")
    assert expected.keys() == {5, 6, 7, 8}
    assert losses(folder / "one-on-two-3") == pytest.approx(expected, abs=1e-5)


@pytest.mark.campaign
@pytest.mark.distributed
def test_a_checkpoint_of_two_ranks_continues_on_one(grid, corpus, folder, tmp_path):
    train(load([], recipe(corpus, tmp_path, 1, source=folder / "two-2")), grid)
    assert losses(tmp_path) == pytest.approx(losses(folder / "two-2"), abs=1e-5)


def test_conversion_carries_weights_and_averages_over_to_the_last_bit(grid, corpus, tmp_path):
    """From each kind of engine to the next one, without a step in between."""
    kinds = [(0, "fp32"), (2, "bf16"), (3, "bf16"), (1, "bf16"), (3, "fp32")]
    train(load([], recipe(corpus, tmp_path, 0, "train_iters=4")), grid)
    path = tmp_path / "global_step4"
    written_by = Engine("fp32", 0, 1, False)
    expected = None
    for number, (stage, precision) in enumerate([*kinds, kinds[0]]):
        config = load([], recipe(corpus, tmp_path, stage, f"precision={precision}"))
        _, record = read_meta(path)
        trainer = Trainer(config, from_config(config, record["vocab"]), grid)
        checkpoint.resume(trainer, path, written_by, {})
        state = adam_state(trainer)
        expected = expected or state
        for name, tensors in expected.items():
            for key, tensor in tensors.items():
                assert torch.equal(state[name][key], tensor), (stage, precision, name, key)
        facts = {key: record[key] for key in ("vocab", "tokenizer")}
        path = checkpoint.save(trainer, tmp_path / str(number), facts)
        written_by = Engine.of(config, 1)


def adam_state(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Weights, averages and step of every parameter as the engine has them, on one rank."""
    optimizer = trainer.engine.optimizer
    state = {}
    for name, parameter in trainer.model.named_parameters():
        if not trainer.config.parallel.zero_stage:
            own = optimizer.state[parameter]
            state[name] = {"weight": parameter.detach().flatten()}
            state[name] |= {key: own[key].flatten() for key in (*AVERAGES, "step")}
            continue
        weight = safe_get_full_fp32_param(parameter)
        assert weight is not None
        flat, start = flat_group(optimizer, parameter)
        own = optimizer.optimizer.state[flat]
        state[name] = {"weight": weight.flatten(), "step": own["step"].flatten()}
        for key in AVERAGES:
            state[name][key] = own[key].narrow(0, start, weight.numel())
    return state


def flat_group(zero, parameter) -> tuple[torch.Tensor, int]:
    """The flat group that holds a parameter of an engine of stage 1 to 3, and where it begins."""
    if hasattr(parameter, "ds_id"):
        group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
        return zero.fp32_partitioned_groups_flat[group], start
    mapping = parameter._hp_mapping
    flat = zero.optimizer.param_groups[mapping.param_group_index]["params"][0]
    return flat, mapping.get_hp_fragment_address().start


def test_weight_decay_of_the_encoding_can_change(grid, corpus, tmp_path):
    """Parameters have numbers in the state of stage 0; another order must not mix them up."""
    train(load([], recipe(corpus, tmp_path / "run", 0)), grid)
    more = ["pos_emb_weight_decay=true", "weight_decay=0"]
    new = tmp_path / "new"
    train(load([], recipe(corpus, new, 0, *more, source=tmp_path / "run")), grid)
    assert losses(new) == pytest.approx(losses(tmp_path / "run"), abs=1e-3)


def test_another_number_of_ranks_must_keep_the_windows_of_a_step(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    path = folder / "global_step4"
    write_record(path, read_record(path) | {"ranks": 2, "windows_per_step": 8})
    with pytest.raises(UserError) as fault:
        train(settings(corpus, folder), grid)
    assert str(fault.value) == (
        f"load: a step of {folder}/global_step4 took 8 windows on 2 rank(s), here it would take"
        " 4 on 1 - set gradient_accumulation_steps=2 to keep it, or train_batch_size=4 if that is"
        " meant"
    )
    train(settings(corpus, folder, "train_batch_size=4", "train_iters=5"), grid)
    assert latest_step(folder) == 5


@pytest.mark.campaign
def test_a_missing_file_of_another_engine_is_one_message(grid, corpus, folder, tmp_path):
    copy = copy_of(folder / "two-2", tmp_path)
    missing = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (copy / "global_step4" / missing).unlink()
    config = load([], recipe(corpus, tmp_path / "new", 2, source=copy))
    with pytest.raises(UserError, match=missing):
        train(config, grid)
