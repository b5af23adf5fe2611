"""What a run must not give away: secrets of its user, and ports to other machines."""

import os
import socket

import pytest

from megatron.parallel import grid
from tests.support import call
from tests.test_train import TINY

SECRETS = {
    "WANDB_API_KEY": "5ecre7" * 7,
    "HF_TOKEN": "hf_secretsecretsecret",
    "AWS_SECRET_ACCESS_KEY": "aws/secret/secret",
}


@pytest.mark.campaign
def test_no_command_prints_or_writes_a_secret(corpus, tmp_path, monkeypatch):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    lengths = ["--lengths", "64", "--output", rows]
    shown = ""
    for words in (
        ["train.py", *TINY, f"data_path={corpus}", f"save={run}"],
        ["evaluate.py", "--checkpoint", run, "eval_tokens=256", *lengths],
        ["tools/report.py", rows, "--output", tmp_path / "page.html"],
    ):
        done = call(*words)
        assert done.returncode == 0, done.stderr
        shown += done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        shown += path.read_bytes().decode("latin-1") if path.is_file() else ""
    assert [secret for secret in SECRETS.values() if secret in shown] == []


def test_ranks_of_one_machine_use_its_loopback_interface_and_no_others(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def chosen(address, ranks, **environment):
        for name in ("SLURM_NNODES", *grid.LOCAL_RANKS, *grid.INTERFACES):
            os.environ.pop(name, None)
        os.environ.update(environment, WORLD_SIZE=str(ranks), MASTER_ADDR=address)
        grid.stay_inside()
        return {os.environ.get(name) for name in grid.INTERFACES}

    assert chosen("node1", 1) == {"lo"}
    assert chosen("127.0.0.1", 8) == {"lo"}
    assert chosen("node1", 8, LOCAL_WORLD_SIZE="8") == {"lo"}
    assert chosen("node1", 8, SLURM_NNODES="1") == {"lo"}
    for own_address in ("192.0.2.9", "127.0.1.1"):
        monkeypatch.setattr(socket, "gethostbyname", {"": own_address}.get)
        monkeypatch.setattr(socket, "gethostname", str)
        assert chosen("node1.invalid", 16, LOCAL_WORLD_SIZE="8") == {None}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "192.0.2.9")
    assert chosen("192.0.2.1", 16) == {None}
    interfaces = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert chosen("node1", 1, **interfaces) == {"eth0", "ib0"}
