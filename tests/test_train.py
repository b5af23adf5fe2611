"""train.py as a user starts it: every launcher, traps of a machine."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT, run, unlaunched

SHAPE = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    "seq_length=64",
    "pos_emb=mep_param",
]
RECIPE = [
    "train_iters=4",
    "log_interval=1",
    "eval_interval=2",
    "eval_iters=1",
    "optimizer.params.lr=3e-3",
]
LONG = ["train_iters=100000", "warmup=0"]  # windows are drawn for all steps at once
TINY = [*SHAPE, *RECIPE, "tokenizer_type=CharLevelTokenizer"]


def losses(folder, kind="train"):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def alone(forks, corpus, tmp_path_factory):
    """Four steps of plain `python train.py` with batches of four.

    Neither a compiler is needed, nor are stale locks of torch's extensions in the way.
    """
    folder = tmp_path_factory.mktemp("alone")
    build = folder / "extensions"
    for place in ("", "py311_cpu"):
        (build / place / "deepspeed_shm_comm").mkdir(parents=True)
        (build / place / "deepspeed_shm_comm" / "lock").touch()
    environment = {"PATH": "/nonexistent", "CC": "/none", "CXX": "/none"}
    environment["TORCH_EXTENSIONS_DIR"] = str(build)
    words = [*TINY, *LONG, "exit_interval=4", "train_micro_batch_size_per_gpu=4"]
    places = [f"data_path={corpus}", f"save={folder}"]
    done = forks.run("train.py", *words, *places, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in build.rglob("*") if path.is_file()] == ["lock", "lock"]
    return folder


@pytest.mark.distributed
def test_two_ranks_train_as_one_and_ctrl_c_saves_and_prints_one_line(corpus, alone, tmp_path):
    words = [*TINY, *LONG, "num_gpus=2", "train_micro_batch_size_per_gpu=2"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "deepy.py", "train.py", *words, f"data_path={corpus}", "save=run"],
        cwd=tmp_path,
        env=unlaunched(),
        stderr=subprocess.PIPE,
        text=True,
    )
    run, deadline = tmp_path / "run", time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("stopped at step")]) == 1
    assert (run / "latest").exists()
    assert losses(run)[:4] == pytest.approx(losses(alone), rel=1e-5)
    # other windows, same model
    assert losses(run, "valid")[:1] == pytest.approx(losses(alone, "valid")[:1], rel=0.05)


@pytest.mark.distributed
@pytest.mark.campaign
def test_two_ranks_of_torchrun_and_zero_train_as_one(corpus, alone, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    words = [*TINY, *LONG, "exit_interval=4", "zero_optimization.stage=2"]
    words += ["train_micro_batch_size_per_gpu=2"]
    done = run(*launcher, "train.py", *words, f"data_path={corpus}", f"save={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
