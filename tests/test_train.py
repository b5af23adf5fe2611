"""train.py as a user starts it: every launcher, traps of a machine."""

import json

import pytest

from tests.support import run

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


def losses(folder, kind="train"):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def alone(forks, corpus, tmp_path_factory):
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


def test_neither_a_compiler_is_needed_nor_stale_locks_are_in_the_way(corpus, tmp_path):
    build = tmp_path / "extensions"
    for folder in ("", "py311_cpu"):
        (build / folder / "deepspeed_shm_comm").mkdir(parents=True)
        (build / folder / "deepspeed_shm_comm" / "lock").touch()
    environment = {"PATH": "/nonexistent", "CC": "/none", "CXX": "/none"}
    environment["TORCH_EXTENSIONS_DIR"] = str(build)
    places = [f"data_path={corpus}", f"save={tmp_path / 'run'}"]
    done = run("train.py", *TINY, *places, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 4
    assert [path.name for path in build.rglob("*") if path.is_file()] == ["lock", "lock"]
