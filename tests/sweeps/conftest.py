"""A sweep of seconds, trained once for all tests of a file, and the command in this process."""

import io
import json
import os
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import PAUSE, Forks
from tools import reproduce, sweep

STEPS = 300  # enough for eight kills in training
SWEEP = """
settings: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32,
  tokenizer_type: CharLevelTokenizer, train_iters: {steps}, save_interval: 15,
  keep_last_n_checkpoints: 1, log_interval: 5, eval_interval: 0, eval_lengths: [32, 64, 128],
  eval_tokens: 4096, pos_emb: kerple_log}}
grid:
  data: {{good: {{data_path: {corpus}}}, absent: {{data_path: {corpus}_of_nobody}}}}
  seed: [1]
evaluate: {{equal: {{protocol: equal_tokens}}, paper: {{protocol: paper, windows: 8}}}}
"""
TABLE = """
paper: a paper of nobody
provenance: written for this test
sweep: tiny.yml
quantity: perplexity
protocol: paper
windows: 8
part: valid
seeds: 4
cells:
  good:
    kerple_log: {32: [20.0, 1.5], 64: [20.00], 128: out of memory, 256: [1.0]}
    alibi: {32: [3.0]}
"""


@dataclass(frozen=True)
class Done:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


def command(name: str, *words: object) -> Done:
    """`sweep` or `reproduce` in this process."""
    main = {"sweep": sweep.main, "reproduce": reproduce.main}[name]
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
    return Done(int(status or 0), stdout.getvalue(), stderr.getvalue())


def rows(folder: Path) -> list[dict]:
    """results.jsonl without what depends on the clock and the place."""
    clock = ("seconds", "tokens_per_second", "seconds_per_step", "checkpoint", "commit", "checksum")
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in clock} for row in rows]


DEV_NULL = Path(os.devnull)


class Warm:
    """Starts sweeps through tests/sweeps/warm.py, one at a time."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks

    def start(self, *words: object, output: Path = DEV_NULL, errors: Path = DEV_NULL) -> int:
        """Run tools/sweep.py with these words; the id of its process, which leads its group."""
        self.pid = self.forks.start("tests/sweeps/warm.py", *words, log=output, errors=errors)
        return self.pid

    def poll(self, timeout: float = 0) -> int | None:
        """The exit status of the sweep; None while it runs."""
        end = time.monotonic() + timeout
        while (status := self.forks.poll(self.pid)) is None and time.monotonic() < end:
            time.sleep(PAUSE)
        return status


@pytest.fixture(scope="session")
def warm(forks) -> Warm:
    return Warm(forks)


@pytest.fixture(scope="module")
def file(corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "tiny.yml"
    path.write_text(SWEEP.format(corpus=corpus, steps=STEPS))
    return path


@pytest.fixture(scope="module")
def whole(file, warm):
    """The folder of the sweep that nobody disturbs, and what was printed."""
    folder = file.parent / "whole"
    printed = file.with_name("output"), file.with_name("errors")
    warm.start("run", file, "--folder", folder, output=printed[0], errors=printed[1])
    status = warm.poll(180)
    assert status == 1, printed[1].read_text()  # one cell cannot run
    return folder, Done(status, *(path.read_text() for path in printed))
