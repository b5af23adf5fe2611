"""What a run writes and logs, how it ends, and what it never writes."""

import gzip
import json
import math
import os
import signal

import pytest
import torch

from megatron.checkpoints.saved import latest_step, steps_in
from megatron.config import load
from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from megatron.model import from_config
from megatron.training import checkpoint, loop
from megatron.training.checkpoint import full_weights
from megatron.training.loop import train
from megatron.training.trainer import Trainer
from tests.training.conftest import MODEL, check_same, records, settings, tiny

POISON = 60
"""A token whose embedding is so large that its square is infinite: its window's loss is NaN."""


def at_step(monkeypatch, number: int, act) -> None:
    """Call `act` in the middle of a run, after step `number`."""

    train_step = Trainer.train_step

    def acting(trainer, micro_batches):
        result = train_step(trainer, micro_batches)
        if trainer.step == number:
            act()
        return result

    monkeypatch.setattr(Trainer, "train_step", acting)


def signals(*numbers: int):
    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return send


def test_the_console_and_the_files_tell_loss_rate_speed_norm_and_the_encodings_numbers(
    grid, corpus, tmp_path, caplog
):
    more = ["eval_interval=4", "eval_iters=2", "train_iters=4", "peak_theoretical_tflops=0.5"]
    with caplog.at_level("INFO"):
        train(settings(corpus, tmp_path, *more), grid)
    record = records(tmp_path)[4]
    assert record.keys() >= {"loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_gib"}
    assert record["tokens"] == 4 * 4 * 64
    assert record["mfu"] == pytest.approx(record["model_tflops_per_second"] / 0.5)
    sizes = {name: len(values) for name, values in record["position"].items()}
    assert sizes == {"kernels.1.p": 4, "kernels.1.a": 4}
    [valid] = records(tmp_path, "valid").values()
    assert valid["perplexity"] == pytest.approx(math.exp(valid["loss"]))
    [line] = [message for message in caplog.messages if message.startswith("step 4/4")]
    for word in ("loss", "lr", "tokens/s", "MFU", "left"):
        assert word in line
    assert len(line) <= 100
    assert f"records: {tmp_path / 'metrics.jsonl'}" in caplog.messages


def test_a_second_training_into_one_folder_is_refused_before_it_writes(grid, corpus, tmp_path):
    config = settings(corpus, tmp_path / "run")
    with (
        owned_folder(tmp_path / "run", "save"),
        pytest.raises(UserError, match=rf"save: {tmp_path}/run is in use by another"),
    ):
        train(config, grid)
    assert list(tmp_path.iterdir()) == []


# --- how a run ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "reason", "step"),
    [
        ("exit_interval=3", "exit_interval: 3", 3),
        ("exit_duration_in_mins=1e-4", "exit_duration: 0.0001", 1),
    ],
)
def test_a_run_of_a_set_length_is_saved_and_ends_well(
    grid, corpus, tmp_path, caplog, setting, reason, step
):
    saved = train(settings(corpus, tmp_path, setting), grid)
    assert saved == tmp_path / f"global_step{step}"
    assert latest_step(tmp_path) == step
    assert caplog.messages[-1] == (
        f"stopped at step {step} of 8 ({reason}), saved {saved}; load={saved} continues it"
    )


def test_a_preempted_run_finishes_the_checkpoint_that_a_second_signal_interrupts(
    grid, corpus, tmp_path, monkeypatch, caplog
):
    at_step(monkeypatch, 3, signals(signal.SIGUSR1))

    def interrupted(*args, **options):
        signals(signal.SIGTERM, signal.SIGINT)()
        return full_weights(*args, **options)

    monkeypatch.setattr(checkpoint, "full_weights", interrupted)
    with pytest.raises(SystemExit) as ended:
        train(settings(corpus, tmp_path), grid)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert (
        "SIGTERM: already stopping; press ctrl-C again (or send SIGKILL) to end without saving"
        in caplog.messages
    )
    assert steps_in(tmp_path) == [3]


def test_a_trace_holds_the_third_step_and_changes_no_loss(grid, corpus, tmp_path):
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    train(settings(corpus, plain, "train_iters=4"), grid)
    train(settings(corpus, traced, "train_iters=4", "profile=true"), grid)
    with gzip.open(traced / "profile.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert {"aten::mm", "[memory]"} <= set(names)
    assert names.count("Optimizer.step#AdamW.step") == 1
    check_same(plain, traced)


# --- losses that are not finite -------------------------------------------------------------------


def poisoned(config, vocab, end_of_document=None):
    """A model that is sound as long as it does not meet the token POISON."""
    model = from_config(config, vocab, end_of_document)
    with torch.no_grad():
        model.word_embeddings.weight[POISON] = 3e38
    return model


def batch(*, poison: bool) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(POISON, (4, 65), generator=draw)
    if poison:
        ids[2, 7] = POISON
    return ids


def lettered(letters, folder, *more: str):
    paths = [f"data_path={letters}", f"save={folder}", f"load={folder}"]
    shape = ["train_micro_batch_size_per_gpu=2", "split=[1, 0, 0]"]
    return load([], tiny(*paths, *shape, *MODEL, *more))


@pytest.fixture
def poison(monkeypatch):
    monkeypatch.setattr(loop, "from_config", poisoned)


def test_a_loss_that_is_not_finite_is_named_and_nothing_is_saved_from_there(
    grid, letters, tmp_path, poison
):
    config = lettered(letters, tmp_path, "train_iters=24", "save_interval=2", "log_interval=50")
    with pytest.raises(UserError, match=r"loss: nan, gradient norm nan at step \d+ - ") as f:
        train(config, grid)
    last = latest_step(tmp_path)
    assert last is None or last < int(str(f.value).split()[7])


def test_a_validation_that_is_not_finite_stops_the_run_before_anything_is_overwritten(
    grid, letters, tmp_path, poison
):
    words = ["train_iters=4", "save_interval=2", "eval_interval=4", "eval_iters=20"]
    good_part = "split=[3, 9, 0]"  # documents 3 and 7 are validated on
    with pytest.raises(
        UserError, match=r"validation: the loss is nan at step 4, so no checkpoint is"
    ):
        train(lettered(letters, tmp_path, *words, good_part), grid)
    assert latest_step(tmp_path) == 2
