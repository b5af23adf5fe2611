"""What a run writes and logs, how it ends, and what it never writes."""

import math
import os
import re
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from megatron.checkpoints.saved import find, latest_step
from megatron.errors import UserError
from megatron.training.run import train
from megatron.training.trainer import Trainer
from tests.support import ROOT, unlaunched
from tests.training.conftest import MODEL, records, settings, tiny

SPEED = ("model_tflops_per_second", "mfu", "mfu_without_attention", "peak_memory_gib")
PEAK = ["peak_theoretical_tflops=0.5"]


def test_the_console_and_the_files_tell_loss_rate_speed_norm_and_the_encodings_numbers(
    grid, corpus, tmp_path, caplog
):
    events = tmp_path / "events"
    with caplog.at_level("INFO"):
        config = settings(
            corpus,
            tmp_path / "run",
            "eval_interval=4",
            "eval_iters=2",
            f"tensorboard_dir={events}",
            *PEAK,
        )
        train(config, grid)
    record = records(tmp_path / "run")[8]
    assert record.keys() >= {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "tokens",
        "position",
        *SPEED,
    }
    assert record["tokens"] == 8 * 4 * 64
    assert record["mfu"] == pytest.approx(record["model_tflops_per_second"] / 0.5)
    assert {name: len(values) for name, values in record["position"].items()} == {
        "kernels.1.p": 4,
        "kernels.1.a": 4,
    }
    valid = records(tmp_path / "run", "valid")
    assert valid.keys() == {4, 8}
    assert valid[8]["perplexity"] == pytest.approx(math.exp(valid[8]["loss"]))
    lines = [message for message in caplog.messages if message.startswith("step 8/8")]
    assert len(lines) == 1
    for word in ("loss", "lr", "grad norm", "tokens/s", "% without attention)", "GiB", "left"):
        assert word in lines[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events_read = EventAccumulator(str(events)).Reload()
    assert {
        "train/loss",
        "train/mfu",
        "train/peak_memory_gib",
        "valid/perplexity",
        "position/kernels.1.p/mean",
    } <= set(events_read.Tags()["scalars"])
    assert events_read.Scalars("train/loss")[-1].value == pytest.approx(record["loss"])


def test_a_large_table_of_learned_positions_is_not_written_out_at_every_step(
    grid, corpus, tmp_path
):
    train(settings(corpus, tmp_path, "pos_emb=learned"), grid)
    assert "position" not in records(tmp_path)[8]
    assert (tmp_path / "metrics.jsonl").stat().st_size < 10_000


def test_a_new_run_leaves_the_records_of_another_in_the_same_folder(grid, corpus, tmp_path):
    logs = f"log_dir={tmp_path / 'logs'}"
    train(settings(corpus, tmp_path / "a", logs, "train_iters=2"), grid)
    first = (tmp_path / "logs" / "metrics.jsonl").read_text()
    train(settings(corpus, tmp_path / "b", logs, "train_iters=3"), grid)
    assert (tmp_path / "logs" / "metrics.1.jsonl").read_text() == first
    assert records(tmp_path / "logs").keys() == {1, 2, 3}


def test_a_validation_part_of_few_windows_starts_over(grid, corpus, tmp_path):
    train(
        settings(
            corpus,
            tmp_path,
            "eval_interval=4",
            "eval_iters=1",
            "seq_length_val=4096",
            "train_iters=4",
        ),
        grid,
    )
    assert math.isfinite(records(tmp_path, "valid")[4]["loss"])


def test_weights_that_are_no_numbers_never_replace_good_ones(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "train_iters=2"), grid)
    broken = [
        "optimizer.params.lr=1e30",
        "gradient_clipping=0",
        "warmup=0",
        "log_interval=50",
        "save_interval=1",
    ]
    with pytest.raises(UserError, match=r"loss: nan at step \d+ - lower optimizer.params.lr"):
        train(
            settings(corpus, tmp_path, *broken, "keep_last_n_checkpoints=1", "train_iters=40"), grid
        )
    weights = load_file(find(tmp_path) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_loss_that_is_not_a_number_stops_the_run(grid, corpus, tmp_path):
    config = settings(
        corpus,
        tmp_path,
        "optimizer.params.lr=1e30",
        "gradient_clipping=0",
        "warmup=0",
        "lr_decay_style=constant",
    )
    with pytest.raises(UserError, match=r"loss: nan at step \d+ - lower optimizer.params.lr"):
        train(config, grid)


def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint_to_continue_from(corpus, tmp_path):
    words = [
        f"data_path={corpus}",
        f"save={tmp_path}",
        f"load={tmp_path}",
        "train_iters=100000",
        *MODEL,
    ]
    process = subprocess.Popen(
        [sys.executable, "train.py", *tiny(*words)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=unlaunched(),
    )
    for line in process.stderr:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    stopped = re.search(
        r"stopped at step (\d+) of 100000 \(SIGTERM\), saved (\S+); load=\S+ continues it", rest
    )
    assert stopped, rest
    assert latest_step(tmp_path) == int(stopped[1])
    assert max(records(tmp_path)) == int(stopped[1])


def test_ctrl_c_ends_a_run_after_its_step_with_a_checkpoint_too(
    grid, corpus, tmp_path, monkeypatch, caplog
):
    train_step = Trainer.train_step

    def interrupted(trainer, micro_batches):
        result = train_step(trainer, micro_batches)
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(SystemExit) as ended:
        train(settings(corpus, tmp_path, "train_iters=100"), grid)
    assert ended.value.code == 128 + signal.SIGINT
    assert "SIGINT: stopping after this step" in caplog.messages
    stopped = f"stopped at step 3 of 100 (SIGINT), saved {tmp_path}/global_step3; load="
    assert caplog.messages[-1].startswith(stopped)
    assert latest_step(tmp_path) == max(records(tmp_path)) == 3
