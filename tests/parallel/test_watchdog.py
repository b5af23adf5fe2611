"""A rank that is stopped or stuck is named, and the run ends."""

import os
import signal
import time

import pytest
import torch.distributed

from megatron.parallel import watchdog
from megatron.parallel.grid import Grid
from megatron.parallel.watchdog import Watchdog
from tests.faults.kills import MODEL

SECONDS = 2


@pytest.mark.campaign
@pytest.mark.distributed
def test_a_frozen_rank_is_named_and_the_others_end(forks, corpus, tmp_path):
    words = [*MODEL, "train_iters=100000", "log_interval=5", "eval_interval=0"]
    words += [f"data_path={corpus}", f"hang_timeout={SECONDS}"]
    for frozen, other in ((1, 0), (0, 1)):
        folder, log = tmp_path / f"run{frozen}", tmp_path / f"log{frozen}"
        pids = forks.start_ranks(2, "train.py", *words, f"save={folder}", log=log)
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)  # until steps have been exchanged
        os.kill(pids[frozen], signal.SIGSTOP)
        try:
            assert forks.wait(pids[other]) == 1
        finally:
            os.kill(pids[frozen], signal.SIGKILL)
            forks.wait(pids[frozen])
        start = f"hang_timeout: no step has ended for {SECONDS} seconds: "
        (line,) = [line for line in log.read_text().splitlines() if line.startswith(start)]
        assert f"rank {frozen} does not answer and was at step " in line
        assert f"rank {other} does not answer" not in line
        assert "Traceback" not in log.read_text()


def test_a_silent_rank_is_named_and_a_lost_connection_is_made_again(monkeypatch):
    made, said = [], []

    class Lost:
        """The store: lost once; later rank 2 has said nothing for a while."""

        def __init__(self, *_, **__):
            made.append(self)

        def set(self, key, text):
            self.text = text.encode()

        def multi_get(self, keys):
            if len(made) == 1:
                raise torch.distributed.DistNetworkError("Connection was reset")
            return [self.text, b"57 " + self.text, b""]

    def give_up(message):
        said.append(message)
        dog.ended.set()

    monkeypatch.setattr(watchdog, "TCPStore", Lost)
    monkeypatch.setattr(watchdog, "give_up", give_up)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    dog = Watchdog(Grid(rank=0, ranks=3), 1.0)
    with dog:
        dog.step = 58
        assert dog.ended.wait(10)
    assert len(made) == 2
    assert said == [
        "hang_timeout: no step has ended for 1 seconds: rank 0 is at step 58; rank 1 is at step 57;"
        " rank 2 does not answer and was at step 0 - the checkpoints are whole: look at"
        " that process or its machine and start again; hang_timeout: 0 waits for ever"
    ]


def test_a_process_alone_and_a_run_without_a_limit_are_not_watched(monkeypatch):
    monkeypatch.setattr(watchdog.threading, "Thread", None)  # starting one would fail
    for ranks, seconds in ((1, 100), (2, 0)):
        with Watchdog(Grid(ranks=ranks), seconds) as dog:
            dog.advance(1)
