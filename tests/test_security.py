"""What a run must not give away: secrets of its user, and ports to other machines."""

import os
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from megatron.parallel import grid
from tests.support import ROOT, call, unlaunched
from tests.test_train import TINY

SECRETS = {
    "WANDB_API_KEY": "5ecre7" * 7,
    "HF_TOKEN": "hf_secretsecretsecret",
    "AWS_SECRET_ACCESS_KEY": "aws/secret/secret",
}


def listening(process: subprocess.Popen) -> set[str]:
    """Addresses on which a process or one that it started waits for others, at this moment."""
    addresses = set()
    try:
        parent = psutil.Process(process.pid)
        for one in (parent, *parent.children(recursive=True)):
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add(connection.laddr.ip)
    except psutil.Error:  # one has ended meanwhile
        pass
    return addresses


def revealed(folder: Path) -> list[str]:
    """Files of a folder that hold a secret."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        found += [str(path) for secret in SECRETS.values() if secret.encode() in content]
    return found


@pytest.mark.campaign
@pytest.mark.distributed
def test_two_ranks_wait_for_each_other_on_loopback_and_write_no_secret(
    corpus, tmp_path, monkeypatch
):
    settings = [*TINY, f"data_path={corpus}", f"save={tmp_path / 'run'}", "num_gpus=2"]
    with (tmp_path / "output").open("w") as output:
        training = subprocess.Popen(
            [sys.executable, str(ROOT / "deepy.py"), "train.py", *settings],
            env=unlaunched() | SECRETS,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
        addresses = set()
        deadline = time.monotonic() + 180
        while training.poll() is None and time.monotonic() < deadline:
            addresses |= listening(training)
            time.sleep(0.2)
        training.kill()
    assert training.wait() == 0, (tmp_path / "output").read_text()
    assert addresses
    assert all(ip_address(address).is_loopback for address in addresses), addresses

    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    rows = tmp_path / "rows.jsonl"
    lengths = ["--lengths", "64", "--output", rows]
    measured = call("evaluate.py", "--checkpoint", tmp_path / "run", "eval_tokens=256", *lengths)
    assert measured.returncode == 0, measured.stderr
    page = call("tools/report.py", rows, "--output", tmp_path / "page.html")
    assert page.returncode == 0, page.stderr
    shown = measured.stdout + measured.stderr + page.stdout + page.stderr
    assert [secret for secret in SECRETS.values() if secret in shown] == []
    assert revealed(tmp_path) == []


def test_ranks_of_one_machine_use_its_loopback_interface_and_no_others(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def chosen(**environment: str) -> set[str | None]:
        for name in ("SLURM_NNODES", *grid.LOCAL_RANKS, *grid.INTERFACES):
            os.environ.pop(name, None)
        os.environ.update(environment)
        grid.stay_inside()
        return {os.environ.get(name) for name in grid.INTERFACES}

    assert chosen(WORLD_SIZE="1", MASTER_ADDR="node1") == {"lo"}
    assert chosen(WORLD_SIZE="8", MASTER_ADDR="127.0.0.1") == {"lo"}
    assert chosen(WORLD_SIZE="8", MASTER_ADDR="node1", LOCAL_WORLD_SIZE="8") == {"lo"}
    assert chosen(WORLD_SIZE="8", MASTER_ADDR="node1", SLURM_NNODES="1") == {"lo"}
    assert chosen(WORLD_SIZE="16", MASTER_ADDR="node1", LOCAL_WORLD_SIZE="8") == {None}
    assert chosen(WORLD_SIZE="16", MASTER_ADDR="192.0.2.1") == {None}
    own = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert chosen(WORLD_SIZE="1", MASTER_ADDR="node1", **own) == {"eth0", "ib0"}
