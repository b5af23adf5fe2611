"""Where the numbers of a run go: no log is worth a run, and what fails is a warning."""

import json
import math
from pathlib import Path

import psutil
import pytest
import torch

from megatron.checkpoints.manifest import read_record
from megatron.config import load
from megatron.config.schema import Logging
from megatron.errors import UserError
from megatron.training import metrics as metrics_module
from megatron.training.loop import train
from megatron.training.metrics import (
    Metrics,
    Progress,
    flops_per_token,
    peak_memory,
    peak_of,
    peak_tflops,
    send_results,
    utilisation,
)
from tests.faults.full_disk import fill, on_small_disk
from tests.support import ROOT
from tests.training.conftest import records, settings
from tests.wandb_files import kept_in, server

NOBODY = "http://127.0.0.1:9"  # the port `discard`, at which nothing listens
SENT = ["use_wandb=true", "wandb_project=tiny"]
RUN = "abcd1234"


def warned(caplog) -> list[str]:
    """What this project warned of; wandb's own log goes to a file."""
    return [
        entry.getMessage()
        for entry in caplog.records
        if entry.name.startswith("megatron") and entry.levelname == "WARNING"
    ]


def test_a_full_disk_costs_records_and_no_run_and_leaves_whole_lines(tmp_path, caplog):
    def logged() -> dict:
        log = Metrics(tmp_path, Logging(), {})

        def kept() -> list[int]:
            return [json.loads(line)["step"] for line in log.path.read_text().splitlines()]

        log.log(1, "train", {"text": "x" * 500})
        ballast = fill(tmp_path)
        for step in range(2, 40):  # the last page has room for some
            log.log(step, "train", {"text": "x" * 500})
        before = kept()
        ballast.unlink()
        log.log(40, "train", {"text": "x" * 500})
        log.close()
        return {"before": before, "after": kept(), "messages": caplog.messages}

    found = on_small_disk(tmp_path, 64, logged)
    before = found["before"]
    assert before == list(range(1, len(before) + 1))
    assert 1 <= len(before) < 39
    assert found["after"] == [*before, 40]
    path = tmp_path / "metrics.jsonl"
    assert found["messages"] == [
        f"{path}: step {len(before) + 1} could not be written (No space left on device)"
        " - training goes on, and later records are tried again",
        f"{path}: {39 - len(before)} record(s) were lost",
    ]


def test_a_resumed_run_drops_what_it_writes_again_and_a_new_one_keeps_an_old_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "[" * 5000, '{"step": null}', '{"step": 2}', '{"step": 3}']
    path.write_bytes("\n".join(lines).encode() + b'\n{"step": 2, "ki\xff\x00')
    Metrics(tmp_path, Logging(), {}, resumed_at=2).log(3, "train", {"loss": math.nan})
    assert records_of(path) == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "kind": "train", "loss": None},
    ]
    large = torch.zeros(2000)
    Metrics(tmp_path, Logging(), {}).log(1, "train", {}, {"large": large, "few": large[:2]})
    assert len(records_of(tmp_path / "metrics.1.jsonl")) == 3
    assert records_of(path) == [{"step": 1, "kind": "train", "position": {"few": [0.0, 0.0]}}]


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_places_that_cannot_be_written_are_refused_at_the_start(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=rf"tensorboard_dir: {file}: cannot be written"):
        Metrics(None, Logging(tensorboard_dir=str(file)), {})
    with pytest.raises(UserError, match=r"file/metrics.jsonl: cannot be written"):
        Metrics(file, Logging(), {})


def test_tensorboard_shows_how_learned_numbers_are_spread(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Metrics(None, Logging(tensorboard_dir=str(tmp_path)), {})
    values = torch.tensor([[1.0, 2.0], [2.0, math.inf]])
    log.log(7, "train", {"loss": 1.0}, {"slope": values, "broken": values[1, 1:]})
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["histograms"] == ["position/slope"]
    spread = events.Histograms("position/slope")[0]
    assert (spread.step, spread.histogram_value.num) == (7, 3)
    assert (spread.histogram_value.min, spread.histogram_value.max) == (1, 2)


# --- speed ----------------------------------------------------------------------------------------


def test_a_validation_counts_for_the_time_left_but_not_for_the_speed(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(metrics_module, "_now", lambda: clock[0])
    progress = Progress(step=0, steps=30)
    clock[0] += 20  # ten steps of two seconds
    with progress.paused():
        clock[0] += 80
    assert progress.advance(10) == 2
    assert progress.remaining() == "0:03:20"  # ten seconds a step, all in all
    clock[0] += 5
    assert progress.advance(15) == 1


def test_a_token_of_the_125m_model_costs_742_and_57_megaflops():
    # 12 layers of 12 * 768² + 13 * 768 weights, a norm of 2 * 768, 50304 rows of 768:
    # 123,689,472 weights.
    linear, attention = flops_per_token(load([ROOT / "configs" / "125M.yml"]).model, 50304)
    assert linear == 6 * 123_689_472
    assert attention == 12 * 12 * 768 * 512


def test_utilisation_is_the_share_of_a_known_peak_of_exactly_this_device():
    known = utilisation((6e9, 2e9), 15_600, 312.0)
    assert known == pytest.approx(
        {"model_tflops_per_second": 124.8, "mfu": 0.4, "mfu_without_attention": 0.3}
    )
    assert utilisation((6e9, 2e9), 1000, None) == {"model_tflops_per_second": pytest.approx(8)}
    peaks = [
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
    ]
    for name, precision, peak in peaks:
        assert peak_of(name, precision) == peak
    cpu = torch.device("cpu")
    assert peak_tflops(cpu, "fp32") is None
    assert peak_memory(cpu) > psutil.Process().memory_info().rss / 2


# --- Weights & Biases -----------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.fixture
def online(offline, monkeypatch):
    """As for a user who has a key. Nothing is read from this machine's own settings."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def sent(folder, host: str | None = None) -> Metrics:
    return Metrics(folder, Logging(use_wandb=True, wandb_host=host), {"seed": 1}, run_id=RUN)


def test_a_run_holds_every_number_and_goes_on_when_it_is_resumed(
    offline, grid, corpus, tmp_path, caplog
):
    words = [*SENT, "wandb_artifacts=true"]
    train(settings(corpus, tmp_path, *words, "exit_interval=4"), grid)
    train(settings(corpus, tmp_path, "train_iters=6"), grid)  # without Weights & Biases
    train(settings(corpus, tmp_path, *words), grid)
    before, after = kept_in(tmp_path)
    assert before.id == after.id == read_record(tmp_path / "global_step8")["wandb"]
    assert [record["step"] for record in before.history + after.history] == [1, 2, 3, 4, 7, 8]
    last = before.history[-1]
    assert last["train/loss"] == records(tmp_path)[4]["loss"]
    assert last["position/kernels.1.p/_type"] == "histogram"
    assert not [text for text in warned(caplog) if text.startswith("use_wandb")]
    assert before.artifacts["training"] == ["metrics.jsonl"]
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    send_results({rows: [{"checkpoint": str(tmp_path / "global_step8")}]}, None)
    evaluation = kept_in(tmp_path)[-1]
    assert evaluation.id == before.id
    assert evaluation.artifacts["evaluation"] == ["rows.jsonl"]


def test_a_service_that_dies_costs_records_and_no_run(offline, tmp_path, caplog):
    log = sent(tmp_path)
    log.log(1, "train", {"loss": 1.0})
    assert not log.lost
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith("wandb"):
            child.kill()
            child.wait(10)
    log.log(2, "train", {"loss": 1.0})
    log.close()
    assert warned(caplog)[-1] == "use_wandb: 1 record(s) were lost"


def test_a_server_that_cannot_be_used_costs_one_warning(online, tmp_path, caplog, monkeypatch):
    def one_warning(name: str, address: str) -> str:
        caplog.clear()
        log = sent(tmp_path / name, address)
        log.log(1, "train", {"loss": 1.0}, {"slope": torch.ones(3)})
        log.close()
        [warning] = warned(caplog)
        assert warning.startswith("use_wandb: the server cannot be used (")
        assert warning.endswith(f"{tmp_path / name}/wandb, and `wandb sync` sends them later")
        kept = kept_in(tmp_path / name)[-1]
        assert kept.id == RUN
        assert [record["train/loss"] for record in kept.history] == [1.0]
        return warning

    assert f"({NOBODY} cannot be reached)" in one_warning("unreachable", NOBODY)
    with server(401) as (address, _):
        assert "logged in" in one_warning("refusing", address)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    with server(401) as (address, asked):
        assert "No API key configured" in one_warning("keyless", address)
        assert not asked.is_set()
