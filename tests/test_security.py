"""What a run must not give away: secrets of its user, and ports to other machines."""

import os
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from megatron.cli_errors import LastResort
from megatron.parallel import loopback
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
    (tmp_path / "planted").write_text(SECRETS["HF_TOKEN"])
    assert revealed(tmp_path) == [str(tmp_path / "planted")]


def test_a_traceback_in_a_file_shows_no_values_of_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])

    def fails() -> None:
        token = os.environ["HF_TOKEN"]
        raise RuntimeError(f"a fault of {len(token)} characters")

    handler = LastResort()
    handler.folder = tmp_path
    assert handler.status_of(fails) == 1
    assert list(tmp_path.iterdir())
    assert revealed(tmp_path) == []


@pytest.mark.parametrize(
    ("environment", "inside"),
    [
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "node1"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "SLURM_NNODES": "1"}, True),
        ({"WORLD_SIZE": "16", "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"WORLD_SIZE": "16", "MASTER_ADDR": "192.0.2.1"}, False),
    ],
)
def test_ranks_of_one_machine_use_its_loopback_interface_and_no_others(
    environment, inside, monkeypatch
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("SLURM_NNODES", *loopback.LOCAL_RANKS, *loopback.INTERFACES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loopback.stay_inside()
    chosen = {name: os.environ.get(name) for name in loopback.INTERFACES}
    assert set(chosen.values()) == ({"lo"} if inside else {None})


def test_an_interface_that_the_user_names_is_kept(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    loopback.stay_inside()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
