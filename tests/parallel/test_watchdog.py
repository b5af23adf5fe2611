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
        text = log.read_text()
        start = f"hang_timeout: no step has ended for {SECONDS} seconds: "
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        assert f"rank {frozen} does not answer (its last known step is " in line
        assert f"rank {other} is at step " in line
        assert f"rank {other} does not answer" not in line
        assert "Traceback" not in text


def test_ranks_without_news_are_named_and_where_the_others_are():
    dog = Watchdog(Grid(rank=0, ranks=3), 100.0)
    dog.exchanged_at = 1000.0
    dog.heard_at = [1000.0] * 3
    assert dog._silent(1010.0) == []
    assert dog._silent(1060.0) == [0]  # its store does not answer
    dog.exchanged_at = 1090.0
    dog.heard_at = [1090.0, 1090.0, 1000.0]
    assert dog._silent(1095.0) == [2]
    dog.last[0] = {"step": 58, "place": "training/trainer.py:86 (train_step)"}
    dog.last[1] = {"step": 57, "place": "data/loader.py:9 (next)"}
    assert dog._message([2], 100.0) == (
        "hang_timeout: no step has ended for 100 seconds: rank 0 is at step 58 in"
        " training/trainer.py:86 (train_step); rank 1 is at step 57 in data/loader.py:9 (next);"
        " rank 2 does not answer (its last known step is 0) - the checkpoints are whole: look at"
        " that process or its machine and start again; hang_timeout: 0 waits for ever"
    )


def test_a_process_alone_and_a_run_without_a_limit_are_not_watched(monkeypatch):
    monkeypatch.setattr(watchdog.threading, "Thread", None)  # starting one would fail
    for ranks, seconds in ((1, 100), (2, 0)):
        with Watchdog(Grid(ranks=ranks), seconds) as dog:
            dog.advance(1)


def test_a_lost_connection_to_the_store_is_made_again(monkeypatch):
    """Else the first save that takes longer than hang_timeout would end a healthy run."""
    made = []

    class Lost:
        def __init__(self, *_, **__):
            made.append(self)

        def set(self, key, text):
            self.text = text

        def multi_get(self, keys):
            if len(made) == 1:
                raise torch.distributed.DistNetworkError("Connection was reset")
            dog.ended.set()
            return [self.text.encode() for _ in keys]

    monkeypatch.setattr(torch.distributed, "TCPStore", Lost)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    dog = Watchdog(Grid(rank=0, ranks=2), 5.0)
    dog.beat = 0.01
    with dog:
        assert dog.ended.wait(10)
    assert len(made) == 2
