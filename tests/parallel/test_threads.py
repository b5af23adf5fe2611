"""How many threads compute: by cores, load, processes and model size. Waiting threads sleep."""

import os
import sys

import pytest
import torch

from megatron.parallel import threads
from megatron.parallel.threads import use_threads
from tests.support import run

LARGE = 125_000_000
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A function that sets cores, other programs' threads and processes; threads are put back."""
    for name in (*threads.BY_USER, *threads.LOCAL_RANKS, "WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()

    def set_machine(cores: int, load: int = 0, processes: int = 1) -> None:
        monkeypatch.setattr(threads, "available_cores", lambda: cores)
        monkeypatch.setattr(threads, "other_load", lambda processes: load)
        monkeypatch.setattr(threads, "local_processes", lambda: processes)

    yield set_machine
    torch.set_num_threads(before)


def test_threads_are_the_free_cores_unless_the_model_is_small(machine, caplog):
    caplog.set_level("INFO")
    cases = {  # parameters, cores, load, processes: threads
        (LARGE, 8): 8,
        (LARGE, 8, 3): 5,
        (LARGE, 8, 2, 3): 2,
        (LARGE, 2, 7): 1,
        (900_000, 8): 2,
        (30_000, 2): 1,
    }
    for (parameters, *there), expected in cases.items():
        machine(*there)
        use_threads(parameters, CPU)
        assert torch.get_num_threads() == expected
    assert caplog.messages[1] == (
        "5 thread(s): 125,000,000 parameters, 8 core(s), 3 of them busy, for 1 process(es) of this"
        " run; OMP_NUM_THREADS sets another number"
    )
    use_threads(LARGE, torch.device("cuda"))  # stays as it is
    assert torch.get_num_threads() == 1


def test_a_resumed_run_keeps_its_number_whatever_the_load(machine):
    machine(4, 1)
    use_threads(LARGE, CPU, before=4)
    assert torch.get_num_threads() == 4
    use_threads(LARGE, CPU, before=5)  # of a larger machine
    assert torch.get_num_threads() == 3


def test_the_users_number_is_kept_and_a_busy_machine_gets_a_warning(machine, monkeypatch, caplog):
    machine(4, 1)
    monkeypatch.setenv("MKL_NUM_THREADS", "4")
    torch.set_num_threads(4)
    use_threads(LARGE, CPU, before=2)
    assert torch.get_num_threads() == 4
    assert caplog.messages == [
        "MKL_NUM_THREADS: 4 threads, but 4 core(s), 1 of them busy, for 1 process(es) of this run -"
        " threads will wait for each other; set MKL_NUM_THREADS=3, or unset it to let the load"
        " decide",
        "MKL_NUM_THREADS: 4, was 2 - last digits will differ",
    ]


def test_launchers_say_how_many_processes_share_the_machine(machine, monkeypatch):
    assert threads.local_processes() == 1
    for name, value, expected in (
        ("WORLD_SIZE", "16", 16),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1", 2),
        ("LOCAL_WORLD_SIZE", "8", 8),
    ):
        monkeypatch.setenv(name, value)
        assert threads.local_processes() == expected


def test_the_processes_of_the_run_and_the_load_of_other_cores_do_not_count(monkeypatch):
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (5.0, 0.0, 0.0))
    monkeypatch.setattr(threads.Path, "read_text", lambda self: "5.0 1.0 1.0 7/900 1234")
    assert [threads.other_load(processes) for processes in (1, 4, 8)] == [5, 2, 0]
    monkeypatch.setattr(threads.Path, "read_text", lambda self: "5.0 1.0 1.0 1/900 1234")
    assert threads.other_load(1) == 0  # a program that has just ended
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert threads.other_load(1) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp prints its settings on Linux")
def test_waiting_threads_sleep_unless_the_user_wants_them_to_spin(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for policy, env in (("PASSIVE", {}), ("ACTIVE", {"OMP_WAIT_POLICY": "ACTIVE"})):
        done = run("-c", "import megatron, torch", env={"OMP_DISPLAY_ENV": "true", **env})
        assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
