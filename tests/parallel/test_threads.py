"""How many threads compute: by cores, processes and model size. Waiting threads sleep."""

import pytest
import torch

from megatron.parallel import threads
from megatron.parallel.threads import use_threads
from tests.support import run

LARGE = 125_000_000
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A function that sets cores and processes; the number of threads is put back."""
    for name in threads.BY_USER:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()

    def set_machine(cores: int, processes: int = 1) -> None:
        monkeypatch.setattr(threads, "available_cores", lambda: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    yield set_machine
    torch.set_num_threads(before)


def test_threads_are_the_cores_of_a_process_unless_the_model_is_small_or_the_run_goes_on(machine):
    cases = [  # parameters, cores, processes, threads before: threads
        (LARGE, 8, 1, None, 8),
        (LARGE, 8, 3, None, 2),
        (900_000, 8, 1, None, 2),
        (30_000, 2, 1, None, 1),
        (30_000, 4, 1, 4, 4),
        (LARGE, 4, 1, 5, 4),  # of a larger machine
    ]
    for parameters, cores, processes, before, expected in cases:
        machine(cores, processes)
        use_threads(parameters, CPU, before=before)
        assert torch.get_num_threads() == expected
    use_threads(30_000, torch.device("cuda"))  # stays as it is
    assert torch.get_num_threads() == 4


def test_the_users_number_is_kept_and_a_resumed_run_says_that_it_differs(
    machine, monkeypatch, caplog
):
    machine(4)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    torch.set_num_threads(3)
    use_threads(LARGE, CPU, before=2)
    assert torch.get_num_threads() == 3
    assert caplog.messages == ["3 thread(s) instead of 2: last digits will differ"]


def test_waiting_threads_sleep(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = run("-c", "import megatron, os; print(os.environ['OMP_WAIT_POLICY'])")
    assert done.stdout == "PASSIVE\n", done.stderr


FLUSHES = """
import torch
from megatron.entry import run

def main(config, options):
    torch.set_num_threads(2)
    normal = torch.full((2_000_000,), 2e-38)  # all threads have a part
    return int((normal * 0.1).view(torch.int32).any())

run(main, config_needed=False)
"""


def test_commands_compute_with_zero_for_numbers_below_1e_38_in_all_threads():
    if not torch.set_flush_denormal(False):
        pytest.skip("torch cannot set this mode on this processor")
    done = run("-W", "error", "-c", FLUSHES)
    assert done.returncode == 0, done.stderr
