"""Who a process is, as launchers and schedulers say it."""

import socket
import subprocess
import sys

import pytest

from megatron.errors import UserError
from megatron.parallel import grid, loopback
from megatron.parallel.grid import (
    ALONE,
    SCHEDULERS,
    _environment_of_scheduler,
    connect,
    free_port,
)
from tests.support import run, unlaunched

ENDS = """
import torch.distributed
from megatron import entry
from megatron.errors import UserError
from megatron.parallel.grid import connect

def main(config, options):
    connect().mean(torch.ones(3))
    if FAULT:
        raise UserError("a fault")

def end():
    try:
        entry.run(main, description="", config_needed=False, argv=[])
    except SystemExit as ended:
        print(ended.code, torch.distributed.is_initialized())
"""


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", *(name for names in SCHEDULERS for name in names)):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("names", SCHEDULERS)
def test_a_process_of_a_scheduler_knows_its_place(names, monkeypatch):
    for name, value in zip(names, ("3", "8", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=f"{names[1]}: 8 processes were started, but no MASTER_ADDR and MASTER_PORT"
    ):
        _environment_of_scheduler()
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert _environment_of_scheduler() == {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def test_one_process_alone_asks_nobody(monkeypatch):
    assert _environment_of_scheduler() == {}
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert _environment_of_scheduler() == {}
    assert ALONE["WORLD_SIZE"] == "1"


PLACE = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "abc", "WORLD_SIZE: 'abc' is not a whole number of at least 1 - launchers"),
        ("WORLD_SIZE", "0", "WORLD_SIZE: '0' is not a whole number of at least 1 - launchers"),
        ("RANK", "-1", "RANK: '-1' is not a whole number of at least 0 - launchers set it"),
        ("RANK", None, "RANK: not set, but WORLD_SIZE is 2 - start with deepy.py or torchrun"),
        ("RANK", "2", "RANK: 2 is not below WORLD_SIZE = 2 - ranks begin at 0"),
        ("LOCAL_RANK", "", "LOCAL_RANK: not set, but WORLD_SIZE is 2 - start with deepy.py"),
        ("MASTER_ADDR", None, "MASTER_ADDR: not set, but WORLD_SIZE is 2 - start with deepy.py"),
        ("MASTER_PORT", "no", "MASTER_PORT: 'no' is not a whole number of at least 1 - launchers"),
        ("MASTER_PORT", "70000", "MASTER_PORT: 70000 is no port; give 1 to 65535"),
    ],
)
def test_a_wrong_environment_is_one_message(name, value, message, monkeypatch):
    for key, usual in PLACE.items():
        monkeypatch.setenv(key, usual)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as fault:
        connect()
    assert str(fault.value).startswith(message)


def test_a_first_process_that_is_not_there_is_waited_for_and_named(monkeypatch, caplog):
    port = free_port()
    for key, usual in PLACE.items():
        monkeypatch.setenv(key, usual)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(grid, "MEETING", 0.5)
    monkeypatch.setattr(grid, "SILENT", 0.1)
    with pytest.raises(UserError) as fault:
        grid._meet(1)
    place = f"MASTER_ADDR: nobody answers at 127.0.0.1:{port} (Connection refused)"
    assert str(fault.value) == (
        f"{place} after 0.5 seconds - start rank 0 there, or export its address and port as"
        " MASTER_ADDR and MASTER_PORT"
    )
    assert caplog.messages == [f"rank 1: {place}; waiting up to 0.5 seconds"]


def test_a_first_process_whose_port_is_in_use_says_so(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError) as fault:
            grid._meet(0)
    message = f"MASTER_PORT: another program uses {port} here - choose another port"
    assert str(fault.value) == message


def test_the_first_process_says_who_is_missing_and_ends(monkeypatch, caplog):
    port = free_port()
    for key, usual in PLACE.items():
        monkeypatch.setenv(key, usual)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(grid, "MEETING", 0.5)
    monkeypatch.setattr(grid, "SILENT", 0.1)
    place = loopback.store()
    place.set("here/2", "")
    came = f"ranks: 2 of 3 have come to 127.0.0.1:{port}, not 1"
    with pytest.raises(UserError) as fault:
        grid._call_the_roll(place, 0, 3)
    assert str(fault.value) == (
        f"{came} after 0.5 seconds - start all of them with this address and port, or let"
        " WORLD_SIZE be the number that you start"
    )
    assert caplog.messages == [f"{came}; waiting up to 0.5 seconds"]
    place.set("here/1", "")
    grid._call_the_roll(place, 0, 3)  # all are there


def test_the_others_end_with_the_first():
    place = loopback.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    other = loopback.TCPStore("127.0.0.1", place.port, 2, is_master=False, wait_for_workers=False)
    del place
    with pytest.raises(UserError, match="ranks: rank 0 has ended, see its message - start all"):
        grid._are_there(other, [0])


JOINS = """
from megatron.parallel import grid
grid.JOINING["gloo"] = 1.0
grid.connect()
"""


@pytest.mark.distributed
def test_a_rank_that_has_come_and_gone_is_not_waited_for_half_an_hour():
    port = free_port()
    place = PLACE | {"MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", JOINS],
        env=unlaunched() | place,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        came = loopback.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
        came.set("here/1", "")
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "ranks: they did not connect to each other within 1 seconds, so one of them has ended or"
        " cannot be reached - see its message, and start all again"
    )


@pytest.mark.parametrize(("fault", "status"), [(False, 0), (True, 1)])
def test_a_script_leaves_the_processes_that_it_joined_and_no_others(fault, status):
    found = run("-c", f"{ENDS}\nFAULT = {fault}\nend()\nend()\nconnect()\nend()")
    assert found.stdout.splitlines() == [f"{status} False", f"{status} False", f"{status} True"], (
        found.stderr
    )
