"""Traces of single steps, which cost no run and change no loss."""

import gzip
import json

import pytest
import torch

from megatron.config.schema import Logging
from megatron.parallel.grid import Grid
from megatron.training.loop import train
from megatron.training.profiling import Profiling
from tests.training.conftest import check_same, settings

TRACED = ["profile=true", "profile_step_start=3", "profile_step_stop=4"]


def test_a_trace_holds_the_named_steps_and_changes_no_loss(grid, corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    train(settings(corpus, plain, "train_iters=6"), grid)
    train(settings(corpus, traced, "train_iters=6", *TRACED), grid)
    assert not (plain / "profile").exists()
    [trace] = (traced / "profile").iterdir()
    with gzip.open(trace) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {name for name in names if name.startswith("training step")} == {
        "training step 3",
        "training step 4",
    }
    assert {"aten::mm", "Optimizer.step#AdamW.step", "[memory]"} <= names
    assert f"profile: {trace}, for https://ui.perfetto.dev" in caplog.messages
    check_same(plain, traced)


@pytest.mark.parametrize(
    ("first", "last", "done", "end", "name"),
    [(2, 9, 0, 3, "step2-3"), (2, 6, 4, 8, "step5-6"), (1, 2, 0, 8, "step1-2"), (1, 4, 4, 5, "")],
)
def test_a_run_that_begins_or_ends_within_the_steps_writes_those_that_it_had(
    first, last, done, end, name, tmp_path, caplog
):
    traced = Logging(profile=True, profile_step_start=first, profile_step_stop=last)
    with Profiling(traced, tmp_path, Grid(), done=done) as profiling:
        for number in range(done + 1, end + 1):
            with profiling.step(number):
                torch.ones(2) + 1
    traces = [path.name for path in tmp_path.glob("profile/*")]
    assert traces == ([f"{name}_rank0.trace.json.gz"] if name else [])
    warning = "profile: nothing is recorded, as step 4 has been"
    assert (warning in caplog.messages) == (not name)


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").touch()
    traced = Logging(profile=True, profile_step_start=1, profile_step_stop=1)
    with Profiling(traced, tmp_path, Grid(), done=0) as profiling:
        for number in (1, 2):
            with profiling.step(number):
                pass
    [warning] = caplog.messages
    assert warning.startswith("profile: failed (")
