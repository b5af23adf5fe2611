"""Traces of single steps and snapshots of memory, which cost no run and change no loss."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron.config.schema import Logging
from megatron.parallel.grid import Grid
from megatron.training.profiling import Profiling
from megatron.training.run import train
from tests.training.conftest import records, settings

TRACED = ["profile=true", "profile_step_start=3", "profile_step_stop=4"]
NAME = "step3-4_rank0"


def events(path: Path) -> list[dict]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def steps_of(path: Path) -> list[str]:
    return sorted({e["name"] for e in events(path) if e["name"].startswith("training step ")})


def test_a_trace_holds_the_named_steps_and_changes_no_loss(grid, corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    train(settings(corpus, plain, "train_iters=6"), grid)
    train(settings(corpus, traced, "train_iters=6", *TRACED, "memory_profiling=true"), grid)
    assert not (plain / "profile").exists()
    assert sorted(path.name for path in (traced / "profile").iterdir()) == [
        f"{NAME}.trace.json.gz",
        f"{NAME}.txt",
    ]
    trace = traced / "profile" / f"{NAME}.trace.json.gz"
    assert steps_of(trace) == ["training step 3", "training step 4"]
    names = {event["name"] for event in events(trace)}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
    assert "[memory]" in names
    assert "aten::mm" in trace.with_name(f"{NAME}.txt").read_text()
    assert f"profile: step3-4 is in {trace}, for https://ui.perfetto.dev" in caplog.messages
    without, recorded = records(plain), records(traced)
    for step in range(1, 7):
        assert without[step]["loss"] == recorded[step]["loss"]
        assert without[step]["grad_norm"] == recorded[step]["grad_norm"]
    message = "memory_profiling: snapshots exist for CUDA alone"
    assert sum(text.startswith(message) for text in caplog.messages) == 1


def test_a_run_that_ends_within_the_steps_writes_those_that_it_had(grid, corpus, tmp_path):
    how = ["exit_interval=3", "profile_step_stop=9", *TRACED[:2], "profile_step_start=2"]
    train(settings(corpus, tmp_path, "train_iters=6", *how), grid)
    trace = tmp_path / "profile" / "step2-3_rank0.trace.json.gz"
    assert steps_of(trace) == ["training step 2", "training step 3"]


def test_a_resumed_run_records_what_is_left_of_the_steps(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "train_iters=8", "exit_interval=4"), grid)
    how = ["profile=true", "profile_step_start=2", "profile_step_stop=6"]
    train(settings(corpus, tmp_path, "train_iters=8", *how), grid)
    trace = tmp_path / "profile" / "step5-6_rank0.trace.json.gz"
    assert steps_of(trace) == ["training step 5", "training step 6"]


@pytest.mark.parametrize(
    ("folder", "done", "steps", "reason"),
    [
        (True, 12, 50, "the run goes on after step 12, and profile_step_stop is 12"),
        (True, 0, 9, "the run ends at step 9, and profile_step_start is 10"),
        (False, 0, 50, "neither save nor log_dir is set"),
    ],
)
def test_what_cannot_be_recorded_is_one_warning(tmp_path, caplog, folder, done, steps, reason):
    place = tmp_path if folder else None
    with Profiling(Logging(profile=True), place, Grid(), done=done, steps=steps) as profiling:
        assert not profiling.writes
    assert caplog.messages == [f"profile: nothing is recorded, because {reason}"]
    assert not list(tmp_path.iterdir())


def test_other_ranks_record_where_their_number_is_named(tmp_path):
    for rank in range(3):
        asked = Logging(profile=True, profile_ranks=(0, 2))
        with Profiling(asked, tmp_path, Grid(rank=rank, ranks=3), done=0, steps=50) as profiling:
            assert profiling.writes == (rank in (0, 2))


def test_a_trace_that_cannot_be_written_costs_no_run(grid, corpus, tmp_path, caplog):
    (tmp_path / "profile").write_text("in the way")
    train(settings(corpus, tmp_path, "train_iters=6", *TRACED), grid)
    assert records(tmp_path).keys() == set(range(1, 7))
    failures = [text for text in caplog.messages if text.startswith("profile: ")]
    assert failures == ["profile: failed (File exists) - training goes on without it"]


def test_a_snapshot_that_torch_cannot_make_costs_no_run(tmp_path, caplog):
    """This torch has no CUDA, or there is no device: recording a history for one fails."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    device = torch.device("cuda")
    asked = Logging(memory_profiling=True)
    with Profiling(asked, tmp_path, Grid(device=device), done=0, steps=50) as profiling:
        with profiling.step(1):
            pass
        profiling.after(1)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("memory_profiling: failed (")
    assert caplog.messages[0].endswith(") - training goes on without it")
