"""Evaluations by ranks that share windows: their rows, what they refuse, and how they fail."""

import json

import pytest

from tests.checkpoints import make_checkpoint
from tests.parallel import evaluation_ranks
from tests.parallel.evaluation_ranks import results

LARGE = "init_method_std=0.3"  # so that losses depend on the context
FAILING = """
import os, torch
from megatron.positions import Position, register

@register("failing_encoding")
class Failing(Position):
    def distance_bias(self, length):
        if length > 64 and os.environ.get("RANK") == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return None
"""
MEASURED = {"loss", "accuracy", "token_accuracy", "window_losses"}


@pytest.mark.distributed
def test_rows_of_texts_and_of_tasks_are_those_of_one_rank(forks, corpus, tmp_path):
    task = make_checkpoint(tmp_path / "task", "task:flip_flop", LARGE, "pos_emb=fox")
    run = make_checkpoint(tmp_path / "run", corpus, LARGE, "pos_emb=kerple_log")
    rotary = make_checkpoint(tmp_path / "rotary", corpus, "pos_emb=rotary")
    text = ["--checkpoint", str(run), "--lengths", "64", "96", "eval_tokens=192"]
    cases = {
        "task": ["--checkpoint", str(task), "--lengths", "64", "96", "--windows", "6"],
        "rounded": [*text, "--paper-precision", "on"],
    }
    refused = {
        "sinks": [*text, "--window", "8", "--sinks", "4"],
        "method": ["--checkpoint", str(rotary), "--method", "rerope,window=32"],
    }

    def written(words: dict[str, list[str]], kind: str) -> dict[str, list[str]]:
        return {
            name: [*words[name], "--output", str(tmp_path / f"{name} {kind}.jsonl")]
            for name in words
        }

    log, file = tmp_path / "log", tmp_path / "found.json"
    words = json.dumps(written(cases | refused, "shared"))
    forks.run_ranks(2, evaluation_ranks.__file__, file, words, log=log)
    together = json.loads(file.read_text())
    for name, rows in results(written(cases, "alone")).items():
        assert len(rows) == len(together[name]) == 2, together[name]
        for alone, shared in zip(rows, together[name], strict=True):
            assert alone["loss"] is not None, alone
            for key in MEASURED & alone.keys():
                expected = alone[key]
                if isinstance(expected, float | list):
                    expected = pytest.approx(expected, rel=1e-6, abs=2e-6)
                assert shared[key] == expected, (name, key)
    for name in ("sinks", "method"):
        assert "2 ranks cannot share a text with --method or --sinks" in together[name]


def test_a_size_that_is_given_and_does_not_divide_the_ranks_is_refused(corpus, tmp_path):
    run = make_checkpoint(tmp_path / "run", corpus, "pos_emb=alibi", "context_parallel_size=2")
    words = ["--checkpoint", str(run), "--lengths", "64"]
    by_default, by_key = (
        results({"kept": words}),
        results({"given": words}, "context_parallel_size=3"),
    )
    assert by_default["kept"][0]["length"] == 64  # the training had two ranks: no reason to refuse
    assert "context_parallel_size: needs a multiple of 3" in by_key["given"]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2])
def test_a_fault_of_one_rank_ends_all_with_its_message(forks, corpus, tmp_path, own_registry, size):
    code = tmp_path / "own.py"
    code.write_text(FAILING)
    words = ["pos_emb=failing_encoding", f"pos_emb_file={code}"]
    run = make_checkpoint(tmp_path / "run", corpus, *words, f"context_parallel_size={size}")
    log = tmp_path / "log"
    # Two batches, one for each rank where they do not share.
    words = ["--lengths", "96", "--checkpoint", run, "eval_batch_tokens=96", f"pos_emb_file={code}"]
    pids = forks.start_ranks(2, "evaluate.py", *words, log=log)
    assert [forks.wait(pid, timeout=60) for pid in pids] == [1, 1], log.read_text()
    faults = [line for line in log.read_text().splitlines() if "eval_batch" in line]
    assert [fault.partition(" - ")[0] for fault in faults] == [
        "rank 1: eval_batch_tokens: 1 x 96 tokens do not fit into the device's memory"
    ]
