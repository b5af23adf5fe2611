"""train.py and evaluate.py as a user starts them: every launcher, traps of a machine, bad input."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support import call, run

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
    "eval_interval=4",
    "eval_iters=1",
    "optimizer.params.lr=3e-3",
]
TINY = [*SHAPE, *RECIPE, "tokenizer_type=CharLevelTokenizer"]


def losses(folder: Path, kind: str = "train") -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def alone(forks, corpus, tmp_path_factory) -> Path:
    """A run of plain `python train.py` with batches of four."""
    folder = tmp_path_factory.mktemp("alone")
    batch = "train_micro_batch_size_per_gpu=4"
    done = forks.run("train.py", *TINY, f"data_path={corpus}", f"save={folder}", batch)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (["deepy.py", "train.py"], ["num_gpus=2"]),
        pytest.param(
            ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py"],
            ["zero_optimization.stage=2"],
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["deepy", "torchrun-zero2"],
)
def test_two_ranks_train_as_one(command, settings, corpus, alone, tmp_path):
    batch = "train_micro_batch_size_per_gpu=2"
    done = run(*command, *TINY, f"data_path={corpus}", f"save={tmp_path}", batch, *settings)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    # other windows, same model
    assert losses(tmp_path, "valid") == pytest.approx(losses(alone, "valid"), rel=0.05)


def test_no_compiler_is_needed_and_neither_stale_locks_nor_another_apex_are_in_the_way(
    corpus, tmp_path
):
    build = tmp_path / "extensions"
    for folder in ("", "py311_cpu"):
        (build / folder / "deepspeed_shm_comm").mkdir(parents=True)
        (build / folder / "deepspeed_shm_comm" / "lock").touch()
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text('"""Velruse, flash messages and sessions."""\n')
    environment = {
        "PATH": "/nonexistent",
        "TORCH_EXTENSIONS_DIR": str(build),
        "CC": "/none",
        "CXX": "/none",
        "PYTHONPATH": str(tmp_path),
    }
    places = [f"data_path={corpus}", f"save={tmp_path / 'run'}"]
    done = run("train.py", *TINY, *places, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 4
    assert [path.name for path in build.rglob("*") if path.is_file()] == ["lock", "lock"]


def test_bad_input_is_one_message_with_status_one_and_loses_nothing(corpus, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        for copy in ("short", "foreign"):
            shutil.copy(corpus.with_name(corpus.name + suffix), tmp_path / (copy + suffix))
    os.truncate(tmp_path / "short.bin", 1000)
    (tmp_path / "foreign.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(100))
    (tmp_path / "empty.txt").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    train = ["train.py", *TINY, f"save={tmp_path}/run"]
    prepare = ["prepare_data.py", "--input", tmp_path / "empty.txt", "--name", "none"]
    for command, message in (
        ([*train, "num_layer=3"], "num_layer: no such key; did you mean num_layers?"),
        ([*train, "num_layers=two"], "num_layers: "),
        (["train.py", "configs/nothing.yml"], "nothing.yml"),
        ([*train, f"data_path={tmp_path}/nowhere"], "there are no token files"),
        ([*train, f"data_path={tmp_path}/short"], "short.bin"),
        ([*train, f"data_path={tmp_path}/foreign"], "foreign.idx"),
        ([*prepare, "-d", tmp_path], "the input has no documents with text"),
        (["evaluate.py", "--checkpoint", tmp_path / "gone"], "checkpoint: no folder"),
    ):
        done = call(*command)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3, done.stderr
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before
