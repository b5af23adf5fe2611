"""The launcher: checks first, then a process for each device, and their exit status."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import deepy
from megatron.config import load
from megatron.errors import UserError
from tests.support import ROOT, unlaunched

TINY = [
    "num_layers=2",
    "hidden_size=72",
    "num_attention_heads=12",
    "seq_length=64",
    "max_position_embeddings=64",
]
BY_SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
TRAIN = [*TINY, "data_path=a", "save=b", "train_iters=1"]


def test_under_srun_deepy_is_one_of_the_processes(monkeypatch):
    monkeypatch.setattr(os, "environ", unlaunched() | BY_SRUN)
    become = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(deepy, "_become", become)
    with pytest.raises(SystemExit):
        deepy.main(["train.py", "a.yml"])
    (command, environment), _ = become.call_args
    assert command == ["-u", str(ROOT / "train.py"), "a.yml"]
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("1", "2")


def test_files_end_where_the_options_of_the_script_begin(tmp_path):
    (tmp_path / "tiny.yml").write_text("\n".join(TINY).replace("=", ": "))
    checkpoint = ["--checkpoint", "x"]
    words = [*checkpoint, str(tmp_path / "tiny.yml"), "--lengths", "512", "1024", "seed=5"]
    config = deepy.checked_config(Path("evaluate.py"), words)
    assert config is not None
    assert config.training.seed == 5
    assert deepy.checked_config(Path("evaluate.py"), [*checkpoint, "--lengths", "512"]) is None


def devices(monkeypatch, count, *words, visible=None, script="train.py"):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return deepy.devices_for(Path(script), load([], [*TINY, *words]))


def test_every_visible_cuda_device_gets_a_process_and_the_cpu_one(monkeypatch):
    assert devices(monkeypatch, 4) == [0, 1, 2, 3]
    assert devices(monkeypatch, 4, "num_gpus=2") == [0, 1]
    assert devices(monkeypatch, 2, visible="3,5") == ["3", "5"]
    assert devices(monkeypatch, 1, visible="MIG-0f") == ["MIG-0f"]
    assert devices(monkeypatch, 4, script="evaluate.py") == [0, 1, 2, 3]
    assert devices(monkeypatch, 4, script="generate.py") == [0]
    assert devices(monkeypatch, 1, "num_gpus=8", script="evaluate.py") == [0]
    assert devices(monkeypatch, 0) == [0]
    assert devices(monkeypatch, 0, "num_gpus=3") == [0, 1, 2]
    for settings, message in {
        "num_gpus=5": "num_gpus: 5 devices requested, but 4 are visible; lower num_gpus",
        "include=localhost:1": "include, exclude: choose devices of a hostfile",
    }.items():
        with pytest.raises(UserError, match=message):
            devices(monkeypatch, 4, settings)


def test_other_machines_are_reached_with_the_options_that_deepspeed_knows(tmp_path):
    from deepspeed.launcher.runner import parse_args

    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=2\ntwo slots=2\n")
    options = {
        "hostfile": str(hosts),
        "num_nodes": 2,
        "num_gpus": 1,
        "launcher": "slurm",
        "master_port": 29501,
        "master_addr": "one",
    }
    config = load([], [*TINY, *(f"{name}={value}" for name, value in options.items())])
    command = deepy.launcher_words(Path("/x/train.py"), ["a.yml", "--flag"], config)
    understood = vars(parse_args(command))
    assert {name: understood[name] for name in options} == options
    assert (understood["user_script"], understood["user_args"]) == (
        "/x/train.py",
        ["a.yml", "--flag"],
    )


def test_a_hostfile_that_is_not_there_leaves_the_training_to_this_machine(monkeypatch, capsys):
    """GPT-NeoX's 125M.yml and the files of DAPE name /mock_path; DeepSpeed's launcher warns too."""
    started = []

    def become(command, environment):
        started.append(command)
        raise SystemExit

    monkeypatch.setattr(deepy, "_become", become)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # which launch sets
    with pytest.raises(SystemExit):
        deepy.launch(Path("train.py"), ["a.yml"], load([], [*TRAIN, "hostfile=/mock_path"]))
    assert started == [["-u", "train.py", "a.yml"]]
    assert "hostfile: /mock_path" in capsys.readouterr().err
