"""Traces of single steps, which cost no run and change no loss."""

import gzip
import json

import torch

from megatron.config.schema import Logging
from megatron.parallel.grid import Grid
from megatron.training.loop import train
from megatron.training.profiling import Profiling
from tests.training.conftest import records, settings

TRACED = ["profile=true", "profile_step_start=3", "profile_step_stop=4"]


def test_a_trace_holds_the_named_steps_and_changes_no_loss(grid, corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    train(settings(corpus, plain, "train_iters=6"), grid)
    train(settings(corpus, traced, "train_iters=6", *TRACED, "memory_profiling=true"), grid)
    assert not (plain / "profile").exists()
    [trace] = (traced / "profile").iterdir()
    assert trace.name == "step3-4_rank0.trace.json.gz"
    with gzip.open(trace) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {name for name in names if name.startswith("training step")} == {
        "training step 3",
        "training step 4",
    }
    assert {"aten::mm", "Optimizer.step#AdamW.step", "[memory]"} <= names
    assert f"profile: {trace}, for https://ui.perfetto.dev" in caplog.messages
    assert "memory_profiling: snapshots exist for CUDA alone" in caplog.text
    without, recorded = records(plain), records(traced)
    for step in range(1, 7):
        assert without[step]["loss"] == recorded[step]["loss"]


def test_a_run_that_begins_or_ends_within_the_steps_writes_those_that_it_had(tmp_path):
    cases = [(2, 9, 0, 3, "step2-3"), (2, 6, 4, 8, "step5-6"), (1, 2, 0, 8, "step1-2")]
    for first, last, done, end, name in cases:
        traced = Logging(profile=True, profile_step_start=first, profile_step_stop=last)
        folder = tmp_path / name
        with Profiling(traced, folder, Grid(), done=done) as profiling:
            for number in range(done + 1, end + 1):
                with profiling.step(number):
                    torch.ones(2) + 1
        [trace] = (folder / "profile").iterdir()
        assert trace.name == f"{name}_rank0.trace.json.gz"


def test_steps_that_are_over_are_a_warning(tmp_path, caplog):
    with Profiling(Logging(profile=True), tmp_path, Grid(), done=12):
        assert caplog.messages == ["profile: nothing is recorded, as step 12 has been"]
