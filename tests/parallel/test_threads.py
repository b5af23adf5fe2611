"""How many threads compute: by cores, load, processes and model size. Waiting threads sleep."""

import os
import sys

import pytest
import torch

from megatron.parallel import threads
from megatron.parallel.threads import Machine, threads_for, too_many, use_threads
from tests.support import run

LARGE = 125_000_000
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("parameters", "machine", "chosen", "reason"),
    [
        (LARGE, Machine(8), 8, "8 core(s)"),
        (LARGE, Machine(8, load=2.8), 5, "8 core(s), 3 of them busy"),
        (LARGE, Machine(8, processes=2), 4, "8 core(s), shared by 2 processes"),
        (LARGE, Machine(8, 2.0, 3), 2, "8 core(s), 2 of them busy, shared by 3 processes"),
        (LARGE, Machine(2, load=7.0), 1, "2 core(s), 2 of them busy"),
        (900_000, Machine(8), 2, "more would not speed up 900,000 parameters"),
        (30_000, Machine(2), 1, "more would not speed up 30,000 parameters"),
    ],
)
def test_threads_are_the_free_cores_unless_the_model_is_small(parameters, machine, chosen, reason):
    assert threads_for(parameters, machine) == (chosen, reason)


def test_a_number_of_the_users_that_fits_needs_no_warning():
    assert too_many(2, Machine(2)) is None
    assert too_many(1, Machine(2, load=5.0)) is None


def test_more_threads_than_free_cores_are_named_with_the_cure():
    assert too_many(2, Machine(2, load=1.1)) == (
        "OMP_NUM_THREADS: 2 threads in each of 1 process(es), but 1 of 2 core(s) are busy"
        " - threads will wait for each other;"
        " set OMP_NUM_THREADS=1, or unset it to let the load decide"
    )


@pytest.fixture
def busy_machine(monkeypatch):
    monkeypatch.setattr(threads, "this_machine", lambda: Machine(4, load=1.0))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("busy_machine")
def test_without_a_number_of_the_users_the_load_decides_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with caplog.at_level("INFO"):
        use_threads(LARGE, CPU)
    assert torch.get_num_threads() == 3
    assert caplog.messages == [
        "3 thread(s): 4 core(s), 1 of them busy; OMP_NUM_THREADS sets another number"
    ]


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("name", threads.BY_USER)
def test_the_users_number_is_kept_and_a_busy_machine_gets_a_warning(name, monkeypatch, caplog):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(name, "4")
    torch.set_num_threads(4)
    use_threads(LARGE, CPU)
    assert torch.get_num_threads() == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"{name}: 4 threads in each of 1 process(es)")


@pytest.mark.usefixtures("busy_machine")
def test_a_resumed_run_keeps_its_number_whatever_the_load(monkeypatch, caplog):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with caplog.at_level("INFO"):
        use_threads(LARGE, CPU, before=4)
    assert torch.get_num_threads() == 4
    assert caplog.messages == ["4 thread(s), as before; OMP_NUM_THREADS sets another number"]


@pytest.mark.usefixtures("busy_machine")
def test_a_machine_with_fewer_cores_than_the_run_had_chooses_anew(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_threads(LARGE, CPU, before=5)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("busy_machine")
def test_another_number_of_the_users_than_before_is_named(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    use_threads(LARGE, CPU, before=2)
    assert caplog.messages == ["OMP_NUM_THREADS: 3, was 2 - last digits will differ"]


@pytest.mark.usefixtures("busy_machine")
def test_on_a_gpu_threads_stay_as_they_are(monkeypatch, caplog):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    use_threads(LARGE, torch.device("cuda"))
    assert torch.get_num_threads() == before
    assert not caplog.messages


@pytest.mark.parametrize(
    ("average", "now", "load"),
    [(2.0, 0.0, 0.0), (0.1, 3.0, 0.1), (2.0, 1.5, 1.5), (2.0, None, 2.0)],
    ids=["just ended", "just begun", "goes on", "without /proc"],
)
def test_only_a_program_that_ran_and_still_runs_counts_as_load(monkeypatch, average, now, load):
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    monkeypatch.setattr(threads, "_running_now", lambda: now)
    assert threads._load() == load


def test_the_processes_of_the_run_are_no_load_for_each_other(monkeypatch):
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "local_processes", lambda: 4)
    for load, others in ((0.4, 0.0), (3.0, 0.0), (5.0, 2.0)):
        monkeypatch.setattr(threads, "_load", lambda load=load: load)
        assert threads.this_machine() == Machine(8, others, 4)


def test_the_load_of_a_large_machine_does_not_count_on_the_few_cores_of_a_job(monkeypatch):
    monkeypatch.setattr(threads, "_load", lambda: 100.0)
    monkeypatch.setattr(threads, "local_processes", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    for cores, load in ((8, 0.0), (128, 100.0)):
        monkeypatch.setattr(threads, "available_cores", lambda cores=cores: cores)
        assert threads.this_machine() == Machine(cores, load)


def test_a_containers_quota_limits_the_cores(tmp_path):
    path = tmp_path / "cpu.max"
    assert threads._cgroup_quota(path) is None
    path.write_text("max 100000\n")
    assert threads._cgroup_quota(path) is None
    path.write_text("150000 100000\n")
    assert threads._cgroup_quota(path) == 1.5


def test_launchers_say_how_many_processes_share_the_machine(monkeypatch):
    for name in (*threads.LOCAL_PROCESSES, "WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert threads.local_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert threads.local_processes() == 16
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x3),1")
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert threads.local_processes() == 2
    monkeypatch.setenv("SLURM_NODEID", "3")
    assert threads.local_processes() == 1
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "several")
    assert threads.local_processes() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert threads.local_processes() == 8


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp prints its settings on Linux")
@pytest.mark.parametrize(
    ("imports", "env", "policy"),
    [
        ("import train", {}, "PASSIVE"),
        ("import megatron, torch", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
    ids=["default", "user"],
)
def test_waiting_threads_sleep_unless_the_user_wants_them_to_spin(
    imports, env, policy, monkeypatch
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = run("-c", imports, env={"OMP_DISPLAY_ENV": "true", **env})
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
