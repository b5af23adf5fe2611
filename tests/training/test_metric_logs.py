"""No log is worth a run: what fails is a warning, what cannot start is refused at once."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.config.schema import Logging
from megatron.errors import UserError
from megatron.training import metric_logs
from megatron.training.metric_logs import JsonLines, checked_logs
from megatron.training.metrics import Metrics
from megatron.training.records import Record, Spared
from tests.faults.full_disk import fill, on_small_disk


def record(step: int) -> Record:
    return Record(step, "train", {"loss": step / 10, "text": "x" * 500})


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_full_disk_costs_records_and_no_run_and_leaves_whole_lines(tmp_path, caplog):
    def logged() -> dict:
        path = tmp_path / "metrics.jsonl"
        log = Spared(JsonLines(path, None), "metrics.jsonl")
        log.write(record(1))
        ballast = fill(tmp_path)
        for step in range(2, 40):  # the last page has room for some
            log.write(record(step))
        kept = steps_in(path)
        ballast.unlink()
        log.write(record(40))
        log.close()
        return {"kept": kept, "after": steps_in(path), "messages": caplog.messages}

    found = on_small_disk(tmp_path, 64, logged)
    kept = found["kept"]
    assert kept == list(range(1, len(kept) + 1))
    assert 1 <= len(kept) < 39
    assert found["after"] == [*kept, 40]
    assert found["messages"] == [
        f"metrics.jsonl: step {len(kept) + 1} could not be written (No space left on device)"
        " - training goes on, and later records are tried again",
        f"metrics.jsonl: {39 - len(kept)} record(s) were lost",
    ]


def test_a_resumed_run_drops_what_was_cut_off_or_is_no_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [record(1).line(), "[" * 5000 + "\n", '{"step": null}\n', record(2).line()]
    path.write_bytes("".join(lines).encode() + b'{"step": 2, "ki\xff\x00')
    log = JsonLines(path, resumed_at=2)
    assert steps_in(path) == [1, 2]
    log.write(record(3))
    assert steps_in(path) == [1, 2, 3]


def test_places_that_cannot_be_written_are_refused_at_the_start(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        settings = Logging(tensorboard_dir=str(place))
        with (
            pytest.raises(UserError, match=rf"tensorboard_dir: {place}: cannot be written \(Not a"),
            checked_logs(settings),
        ):
            pass
    with pytest.raises(UserError, match=r"file/metrics.jsonl: cannot be written"):
        Metrics(file, Logging(), {})


def test_a_package_that_is_missing_is_named_before_training(monkeypatch):
    monkeypatch.setattr(metric_logs.importlib.util, "find_spec", lambda name: None)
    message = (
        "^tensorboard_dir: the package tensorboard is not installed - pip install tensorboard, or"
        " leave tensorboard_dir away$"
    )
    with (
        pytest.raises(UserError, match=message),
        checked_logs(Logging(tensorboard_dir="events")),
    ):
        pass


def test_tensorboard_shows_how_learned_numbers_are_spread(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(None, Logging(tensorboard_dir=str(tmp_path)), {})
    values = torch.tensor([[1.0, 2.0], [2.0, math.inf]])
    metrics.log(7, "train", {"loss": 1.0}, {"slope": values, "broken": values[1, 1:]})
    metrics.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["histograms"] == ["position/slope"]
    spread = events.Histograms("position/slope")[0]
    assert (spread.step, spread.histogram_value.num) == (7, 3)
    assert (spread.histogram_value.min, spread.histogram_value.max) == (1, 2)
    assert spread.histogram_value.sum == 5


def test_tensorboard_on_a_full_disk_costs_no_run(tmp_path, caplog):
    def logged() -> list[str]:
        metrics = Metrics(None, Logging(tensorboard_dir=str(tmp_path / "events")), {})
        fill(tmp_path)
        for step in range(3000):
            metrics.log(step, "train", {"loss": 1.0})
        metrics.close()
        return caplog.messages

    messages = on_small_disk(tmp_path, 64, logged)
    assert "events: step " in messages[0]
    assert "could not be written (No space left on device) - training goes on" in messages[0]
    assert messages[-1].endswith(" record(s) were lost")
