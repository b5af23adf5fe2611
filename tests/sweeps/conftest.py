"""A sweep of seconds, trained once for all tests of a file, and the command in this process."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

STEPS = 300  # enough for eight kills in training
SWEEP = """
settings: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32,
  tokenizer_type: CharLevelTokenizer, train_iters: {steps}, save_interval: 15,
  keep_last_n_checkpoints: 1, log_interval: 5, eval_interval: 0, eval_lengths: [32, 64, 128],
  eval_tokens: 4096, pos_emb: kerple_log}}
grid:
  data: {{good: {{data_path: {corpus}}}
    , absent: {{data_path: {corpus}, vocab_file: {corpus}_of_nobody, tokenizer_type: HFTokenizer}}}}
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
WARM = "tests/sweeps/warm.py"  # tools/sweep.py, whose scripts start at once


def rows(folder: Path) -> list[dict]:
    """results.jsonl without what depends on the clock and the place."""
    clock = ("seconds", "tokens_per_second", "seconds_per_step", "checkpoint", "commit", "checksum")
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in clock} for row in rows]


@pytest.fixture(scope="module")
def file(corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "tiny.yml"
    path.write_text(SWEEP.format(corpus=corpus, steps=STEPS))
    return path


@pytest.fixture(scope="module")
def whole(file, forks) -> tuple[Path, CompletedProcess]:
    """The folder of the sweep that nobody disturbs, and what was printed."""
    folder = file.parent / "whole"
    done = forks.run(WARM, "run", file, "--folder", folder)
    assert done.returncode == 1, done.stderr  # one cell cannot run
    return folder, done
