"""A resumed run repeats the uninterrupted one: its numbers, text, records and averages."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors.torch import load_file

from megatron.checkpoints.manifest import entry_of, read_record, write_record
from megatron.checkpoints.read import load_for_evaluation, read_meta
from megatron.checkpoints.saved import latest_step
from megatron.config import load
from megatron.errors import UserError
from megatron.training.checkpoint import _data_only
from megatron.training.run import train
from tests.training.conftest import MODEL, copy_of, records, settings, tiny


def valid_losses(folder: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in records(folder, "valid").items()}


LLAMA = ["norm=rmsnorm", "activation=swiglu", "num_key_value_heads=2", "qk_norm=true"]
DOCUMENTS = ["reset_attention_mask=true", "reset_position_ids=true", "eod_mask_loss=true"]


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["precision=bf16"],
        ["zero_optimization.stage=1", "gradient_accumulation_steps=2"],
        ["zero_optimization.stage=2", "num_workers=1"],
        ["zero_optimization.stage=3"],
        ["precision=bf16", "zero_optimization.stage=2", "gradient_accumulation_steps=2"],
        ["precision=bf16", "zero_optimization.stage=3"],
        ["checkpoint_activations=true", *LLAMA],
        ["precision=bf16", "zero_optimization.stage=3", *LLAMA],
        DOCUMENTS,
    ],
    ids=[
        *("fp32", "bf16", "zero1", "zero2", "zero3", "bf16-zero2", "bf16-zero3"),
        *("llama", "llama-bf16-zero3", "documents"),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_last_bit(grid, corpus, tmp_path, how):
    """Each way has dropout and a learned encoding, and a validation at every fourth step."""
    how = [*how, "eval_interval=4", "eval_iters=1"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(settings(corpus, straight, *how), grid)
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "global_step8")
    (broken / "latest").write_text("global_step4")
    train(settings(corpus, broken, *how), grid)
    first, second = records(straight), records(broken)
    assert first.keys() == second.keys() == set(range(1, 9))
    for step in first:
        for key in ("loss", "grad_norm", "lr", "position"):
            assert first[step][key] == second[step][key], (step, key)
    assert valid_losses(broken) == valid_losses(straight)
    assert valid_losses(straight).keys() == {4, 8}
    weights = load_file(broken / "global_step8" / "model.safetensors")
    for name, tensor in load_file(straight / "global_step8" / "model.safetensors").items():
        assert torch.equal(weights[name], tensor), name


def test_a_resumed_run_computes_with_the_threads_that_it_had(grid, corpus, tmp_path, monkeypatch):
    train(settings(corpus, tmp_path, "train_iters=4"), grid)
    path = tmp_path / "global_step4"
    assert read_meta(path)[1]["threads"] == torch.get_num_threads()
    asked = []
    monkeypatch.setattr(
        "megatron.training.run.use_threads", lambda *_, before, **__: asked.append(before)
    )
    train(settings(corpus, tmp_path), grid)
    assert asked == [torch.get_num_threads()]


def test_a_resumed_run_logs_the_uninterrupted_ones_means_between_checkpoints(
    grid, corpus, tmp_path
):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    every = ["save_interval=3", "log_interval=4"]
    train(settings(corpus, straight, *every), grid)
    shutil.copytree(straight, broken)
    for step in (6, 8):
        shutil.rmtree(broken / f"global_step{step}")
    train(settings(corpus, broken, *every), grid)
    assert records(straight).keys() == {4, 8}
    assert [records(broken)[step]["loss"] for step in (4, 8)] == [
        records(straight)[step]["loss"] for step in (4, 8)
    ]


def test_a_resumed_run_with_larger_batches_goes_on_with_text_it_has_not_seen(
    grid, corpus, tmp_path
):
    train(settings(corpus, tmp_path, "train_iters=4"), grid)
    train(settings(corpus, tmp_path, "train_micro_batch_size_per_gpu=8"), grid)
    _, _, meta = load_for_evaluation(tmp_path)
    assert (meta["step"], meta["windows"], meta["windows_per_step"]) == (8, 4 * 4 + 4 * 8, 8)
    assert records(tmp_path)[8]["tokens"] == (4 * 4 + 4 * 8) * 64


def test_a_record_that_was_cut_off_does_not_stop_a_resumed_run(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "train_iters=4"), grid)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-2])
    train(settings(corpus, tmp_path), grid)
    assert records(tmp_path).keys() == {1, 2, 3, 5, 6, 7, 8}


def test_a_folder_of_one_step_can_be_continued_elsewhere(grid, corpus, trained, tmp_path):
    start = copy_of(trained, tmp_path) / "global_step4"
    config = load(
        [],
        tiny(
            f"data_path={corpus}",
            f"load={start}",
            f"save={tmp_path / 'new'}",
            "train_iters=6",
            *MODEL,
        ),
    )
    train(config, grid)
    assert records(tmp_path / "new").keys() == {5, 6}


def test_defaults_written_out_are_the_same_model(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    written = ["pos_emb_args.kernels=[gaussian, kerple_log]", "pos_emb_args.weights=equal"]
    train(settings(corpus, folder, *written, "max_position_embeddings=99", "train_iters=5"), grid)
    assert latest_step(folder) == 5


class Getattr:
    """Pickled as getattr(of, name), as Python 3.11.0 to 3.11.3 pickle members of an enum."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_a_stage_of_zero_as_early_pythons_3_11_write_it_is_read(tmp_path):
    torch.save({"zero_stage": Getattr(ZeroStageEnum, "gradients")}, tmp_path / "state.pt")
    with _data_only():
        loaded = torch.load(tmp_path / "state.pt")
    assert loaded == {"zero_stage": ZeroStageEnum.gradients}


@pytest.mark.parametrize(
    ("of", "name"),
    [(ZeroStageEnum, "__class__"), (ZeroStageEnum, "_missing_"), (DynamicLossScaler, "__init__")],
)
def test_a_state_takes_no_other_attribute(tmp_path, of, name):
    torch.save({"zero_stage": Getattr(of, name)}, tmp_path / "state.pt")
    with _data_only(), pytest.raises(pickle.UnpicklingError, match="refused getattr of <"):
        torch.load(tmp_path / "state.pt")


def test_pickles_that_would_run_code_are_not_loaded(grid, corpus, trained, tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = copy_of(trained, tmp_path)
    state = folder / "global_step4" / "mp_rank_00_model_states.pt"
    torch.save({"module": Harmful()}, state)
    record = read_record(state.parent)  # of whoever wrote this file
    record["files"][state.name] = entry_of(state)
    write_record(state.parent, record)
    with pytest.raises(
        UserError, match=r"global_step4: the engine's state cannot be loaded \(Weights only load"
    ):
        train(settings(corpus, folder), grid)
    assert not (tmp_path / "ran").exists()
