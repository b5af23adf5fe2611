"""`deterministic: true` repeats a run bit for bit, and refuses what cannot be repeated."""

import pytest
import torch

from megatron.errors import UserError
from megatron.parallel import threads
from megatron.training.deterministic import naming_operations, use_deterministic_algorithms
from tests.support import run
from tests.training.conftest import records, tiny


@pytest.fixture
def deterministic(monkeypatch):
    """Deterministic algorithms in this process, for one test."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    use_deterministic_algorithms()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    cudnn.deterministic, cudnn.benchmark = before


@pytest.mark.campaign
def test_two_processes_have_the_same_losses(corpus, tmp_path, monkeypatch):
    for name in threads.BY_USER:
        monkeypatch.delenv(name, raising=False)
    for name in ("first", "second"):
        paths = [f"data_path={corpus}", f"save={tmp_path / name}"]
        model = ["pos_emb=mep_param", "precision=bf16", "hidden_dropout=0.1", "hidden_size=192"]
        steps = ["train_iters=4", "deterministic=true"]
        done = run("train.py", *tiny(*paths, *model, *steps))
        assert done.returncode == 0, done.stderr
    first, second = records(tmp_path / "first"), records(tmp_path / "second")
    for step in (1, 2, 3, 4):
        for key in ("loss", "grad_norm", "position"):
            assert first[step][key] == second[step][key]


def test_the_threads_of_a_deterministic_run_do_not_follow_the_load(monkeypatch):
    for name in threads.BY_USER:
        monkeypatch.delenv(name, raising=False)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for load in (0.0, 1.0, 7.0):
        machine = threads.Machine(8, load)
        monkeypatch.setattr(threads, "this_machine", lambda machine=machine: machine)
        threads.use_threads(10**9, torch.device("cpu"), by_load=False)
    assert chosen == [8, 8, 8]


def test_an_operation_that_cannot_be_repeated_is_named(deterministic):
    with pytest.raises(UserError) as fault, naming_operations():
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
    assert str(fault.value) == (
        "deterministic: put_ does not have a deterministic implementation on this device"
        " - set deterministic: false, or take another encoding"
    )


def test_other_faults_pass(deterministic):
    with pytest.raises(RuntimeError, match="another"), naming_operations():
        raise RuntimeError("another")
