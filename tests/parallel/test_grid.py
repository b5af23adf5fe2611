"""Who a process is, as launchers and schedulers say it."""

import pytest

from megatron.errors import UserError
from megatron.parallel.grid import ALONE, SCHEDULERS, _environment_of_scheduler
from tests.support import run

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


@pytest.mark.parametrize(("fault", "status"), [(False, 0), (True, 1)])
def test_a_script_leaves_the_processes_that_it_joined_and_no_others(fault, status):
    found = run("-c", f"{ENDS}\nFAULT = {fault}\nend()\nend()\nconnect()\nend()")
    assert found.stdout.splitlines() == [f"{status} False", f"{status} False", f"{status} True"], (
        found.stderr
    )
