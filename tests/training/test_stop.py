"""What ends a run early, with which status, and that its checkpoint is whole."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import latest_step, steps_in
from megatron.config import load
from megatron.errors import UserError
from megatron.parallel.grid import Grid, free_port
from megatron.parallel.launcher import environments
from megatron.training import checkpoint, stop
from megatron.training.run import train
from megatron.training.stop import Stop
from megatron.training.trainer import Trainer
from tests.support import ROOT, unlaunched
from tests.training.conftest import records, settings, tiny


def at_step(monkeypatch, number: int, act) -> None:
    """Call `act` in the middle of a run, after step `number`."""
    train_step = Trainer.train_step

    def acting(trainer, micro_batches):
        result = train_step(trainer, micro_batches)
        if trainer.step == number:
            act()
        return result

    monkeypatch.setattr(Trainer, "train_step", acting)


def signals(*numbers: int):
    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return send


def workers() -> list[psutil.Process]:
    """Processes that read samples."""
    return [psutil.Process(child.pid) for child in multiprocessing.active_children()]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("exit_interval=3", "exit_interval: 3"),
        ("exit_duration_in_mins=1e-4", "exit_duration: 0.0001"),
    ],
)
def test_a_run_of_a_set_length_is_saved_and_ends_well(
    grid, corpus, tmp_path, caplog, setting, reason
):
    saved = train(settings(corpus, tmp_path, setting), grid)
    step = latest_step(tmp_path)
    assert step == (3 if setting == "exit_interval=3" else 1)
    assert saved == tmp_path / f"global_step{step}"
    assert caplog.messages[-1] == (
        f"stopped at step {step} of 8 ({reason}), saved {saved}; load={saved} continues it"
    )


def test_a_stopped_run_without_save_says_that_nothing_was_saved(grid, corpus, caplog):
    config = load([], tiny(f"data_path={corpus}", "train_iters=8", "exit_interval=1"))
    assert train(config, grid) is None
    assert caplog.messages[-1] == (
        "stopped at step 1 of 8 (exit_interval: 1), nothing was saved, for save is not set"
    )


def test_exit_interval_at_the_last_step_leaves_the_run_complete(grid, corpus, tmp_path, caplog):
    train(settings(corpus, tmp_path, "exit_interval=2", "train_iters=2", "eval_interval=5"), grid)
    assert not [line for line in caplog.messages if line.startswith("stopped")]
    assert records(tmp_path, "valid").keys() == {2}


def test_a_run_ends_before_its_slurm_job_with_the_status_of_sigterm(
    grid, corpus, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv(stop.SLURM_END, str(int(time.time()) + 5))
    with pytest.raises(SystemExit) as ended, caplog.at_level("INFO"):
        train(settings(corpus, tmp_path, "train_iters=5000", "log_interval=5000"), grid)
    assert ended.value.code == 128 + signal.SIGTERM
    assert latest_step(tmp_path) is not None
    assert "Slurm ends this job in 0 minutes: the run is saved and stops before" in caplog.messages
    assert "(the end of the Slurm job), saved" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("soon", "SLURM_JOB_END_TIME: 'soon' is no time and is ignored"), ("1000", "is past and is")],
)
def test_an_end_of_a_slurm_job_that_cannot_be_is_ignored(monkeypatch, caplog, text, message):
    monkeypatch.setenv(stop.SLURM_END, text)
    assert not Stop(Grid()).wanted()
    assert message in caplog.text


def test_time_for_two_steps_and_a_checkpoint_is_left_before_the_end_of_a_slurm_job(monkeypatch):
    monkeypatch.setenv(stop.SLURM_END, str(time.time() + 100))
    assert not Stop(Grid(), saving=50).wanted()  # 2 + 75 + 5 seconds before
    assert Stop(Grid(), saving=70).wanted()
    slow = Stop(Grid(), saving=50)
    slow.moment -= 20  # as if the first step had taken 20 seconds
    assert slow.wanted()
    measured = Stop(Grid(), saving=1000)
    with measured.saving():
        pass
    assert not measured.wanted()


def test_a_preempted_run_finishes_the_checkpoint_that_a_second_signal_interrupts(
    grid, corpus, tmp_path, monkeypatch, caplog
):
    at_step(monkeypatch, 3, signals(signal.SIGUSR1))
    full_weights = checkpoint.full_weights

    def interrupted(*args, **options):
        signals(signal.SIGTERM, signal.SIGINT)()
        return full_weights(*args, **options)

    monkeypatch.setattr(checkpoint, "full_weights", interrupted)
    with pytest.raises(SystemExit) as ended:
        train(settings(corpus, tmp_path), grid)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert "SIGTERM: already stopping; ctrl-C or SIGKILL ends without saving" in caplog.messages
    assert steps_in(tmp_path) == [3]
    monkeypatch.undo()
    train(settings(corpus, tmp_path, "train_iters=4"), grid)


def test_a_late_second_ctrl_c_interrupts_a_checkpoint_and_leaves_the_one_before(
    grid, corpus, tmp_path, monkeypatch
):
    train(settings(corpus, tmp_path, "train_iters=2"), grid)
    at_step(monkeypatch, 3, signals(signal.SIGINT))
    monkeypatch.setattr(stop, "ONE_SIGNAL", 0.0)
    monkeypatch.setattr(checkpoint, "full_weights", lambda *_, **__: signals(signal.SIGINT)())
    with pytest.raises(KeyboardInterrupt):
        train(settings(corpus, tmp_path), grid)
    assert steps_in(tmp_path) == [2]
    monkeypatch.undo()
    train(settings(corpus, tmp_path, "train_iters=4"), grid)
    assert steps_in(tmp_path) == [2, 4]
    assert not list(tmp_path.glob("partial_*"))


def test_a_validation_is_given_up_for_a_signal(grid, corpus, tmp_path, monkeypatch):
    losses = Trainer.losses

    def interrupted(trainer, batch, *, mean=False):
        if not mean:
            signals(signal.SIGTERM)()
        return losses(trainer, batch, mean=mean)

    monkeypatch.setattr(Trainer, "losses", interrupted)
    with pytest.raises(SystemExit):
        train(settings(corpus, tmp_path, "eval_interval=2", "eval_iters=10000"), grid)
    assert latest_step(tmp_path) == 2
    assert not records(tmp_path, "valid")


def test_a_lost_process_that_reads_samples_is_one_message(grid, corpus, tmp_path, monkeypatch):
    # Another test may have left a process of its own.
    at_step(monkeypatch, 3, lambda: [worker.kill() for worker in workers()])
    words = ["num_workers=1", "train_iters=5000", "log_interval=5000", "save_interval=0"]
    with pytest.raises(UserError) as fault:
        train(settings(corpus, tmp_path, *words), grid)
    message = str(fault.value)
    assert message.startswith("data: a process that reads samples was lost (DataLoader worker (pid")
    assert message.endswith(
        " - start the same command again, with num_workers: 0 if it happens again"
    )


def test_a_signal_to_all_processes_of_a_run_lets_it_save(grid, corpus, tmp_path, monkeypatch):
    def signal_all() -> None:
        time.sleep(0.5)  # until a worker that was just started ignores signals
        for process in [*workers(), psutil.Process()]:
            process.send_signal(signal.SIGTERM)

    at_step(monkeypatch, 3, signal_all)
    with pytest.raises(SystemExit) as ended:
        train(settings(corpus, tmp_path, "num_workers=1", "train_iters=5000"), grid)
    assert ended.value.code == 128 + signal.SIGTERM
    assert latest_step(tmp_path) == 3


TWO_RANKS = """
import os, signal, sys
from megatron.parallel.grid import connect
from megatron.training import run
from megatron.training.trainer import Trainer
from tests.training.test_nonfinite import poisoned, settings

folder, letters, *words = sys.argv[1:]
train_step = Trainer.train_step

def interrupted(trainer, micro_batches):
    result = train_step(trainer, micro_batches)
    if trainer.step == 10 and grid.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return result

Trainer.train_step = interrupted
run.from_config = poisoned
grid = connect()
try:
    run.train(settings(letters, folder, "train_iters=100000", *words), grid)
except SystemExit as ended:
    os._exit(ended.code)
"""


@pytest.mark.campaign
@pytest.mark.distributed
def test_two_ranks_skip_and_stop_together_although_one_alone_has_the_reason(letters, tmp_path):
    words = [tmp_path, letters, "skip_nonfinite=1000", "seed=5"]
    command = [sys.executable, "-c", TWO_RANKS, *map(str, words)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for environment in environments(unlaunched(), 2, free_port())
    ]
    messages = [process.communicate(timeout=120)[1] for process in processes]
    statuses = [process.returncode for process in processes]
    assert statuses == [128 + signal.SIGUSR1] * 2, messages
    step = latest_step(tmp_path)
    assert 10 <= step <= 110  # at the exchange after the signal, at most 100 steps later
    skipped = records(tmp_path, "skipped")
    assert [batch["rank"] for batch in skipped[min(skipped)]["batch"]] == [0, 1]
    meta = read_record(tmp_path / f"global_step{step}")
    assert meta["skipped"] == len(skipped)
