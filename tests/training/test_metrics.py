"""Where the numbers of a run go: no log is worth a run, and what fails is a warning."""

import math
from pathlib import Path

import psutil
import pytest
import torch

from megatron.checkpoints.manifest import read_record
from megatron.config import load
from megatron.config.schema import Logging
from megatron.errors import UserError
from megatron.results.files import training_log as records_of
from megatron.training.loop import train
from megatron.training.metrics import (
    Metrics,
    flops_per_token,
    peak_memory,
    peak_of,
    utilisation,
)
from tests.faults.full_disk import fill, on_small_disk
from tests.support import ROOT
from tests.training.conftest import settings

WANDB = ["use_wandb=true", "wandb_project=tiny"]


def test_a_full_disk_costs_records_and_no_run_and_leaves_whole_lines(tmp_path, caplog):
    def logged() -> dict:
        log = Metrics(tmp_path, Logging(), {})
        log.log(1, "train", {"text": "x" * 500})
        ballast = fill(tmp_path)
        for step in range(2, 40):  # the last page has room for some
            log.log(step, "train", {"text": "x" * 500})
        before = [record["step"] for record in records_of(log.path)]
        ballast.unlink()
        log.log(40, "train", {"text": "x" * 500})
        log.close()
        after = [record["step"] for record in records_of(log.path)]
        return {"before": before, "after": after, "messages": caplog.messages}

    log_lines = on_small_disk(tmp_path, 64, logged)
    before = log_lines["before"]
    assert before == list(range(1, len(before) + 1))
    assert 1 <= len(before) < 39
    assert log_lines["after"] == [*before, 40]
    path = tmp_path / "metrics.jsonl"
    assert log_lines["messages"] == [
        f"{path}: step {len(before) + 1} could not be written (the disk is full)"
        " - training continues, and later records will be written if possible",
    ]


def test_a_resumed_run_drops_what_it_writes_again_and_a_new_one_keeps_an_old_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "ki\xff\x00')
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
    # A removed file leaves a gap in the numbers, which must not make another one be replaced.
    (tmp_path / "metrics.1.jsonl").rename(tmp_path / "metrics.2.jsonl")
    Metrics(tmp_path, Logging(), {})
    assert len(records_of(tmp_path / "metrics.1.jsonl")) == 1
    assert len(records_of(tmp_path / "metrics.2.jsonl")) == 3


def test_a_resumed_run_keeps_a_damaged_log_under_another_name(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("{\n")
    Metrics(tmp_path, Logging(), {}, resumed_at=3)
    assert not path.exists()
    assert (tmp_path / "metrics.1.jsonl").read_text() == "{\n"


def test_a_place_that_cannot_be_written_is_refused_and_tensorboard_has_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/metrics.jsonl: cannot be written"):
        Metrics(tmp_path / "file", Logging(), {})
    log = Metrics(None, Logging(tensorboard_dir=str(tmp_path)), {})
    log.log(7, "train", {"loss": 1.5}, {"slope": torch.tensor([[1.0, 2.0], [2.0, 3.0]])})
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    names = [f"position/slope/{statistic}" for statistic in ("mean", "min", "max")]
    assert values == {"train/loss": 1.5, **dict(zip(names, (2, 1, 3), strict=True))}


# --- speed ----------------------------------------------------------------------------------------


def test_a_token_of_the_125m_model_costs_742_and_57_megaflops():
    # 12 layers of 12 * 768² + 13 * 768 weights, a norm of 2 * 768, 50304 rows of 768:
    # 123,689,472 weights.
    flops = flops_per_token(load([ROOT / "configs" / "125M.yml"]).model, 50304)
    assert flops == 6 * 123_689_472 + 12 * 12 * 768 * 512


def test_utilisation_is_the_share_of_a_known_peak_of_exactly_this_device():
    numbers = utilisation(8e9, 15_600, 312.0)
    assert numbers == pytest.approx({"model_tflops_per_second": 124.8, "mfu": 0.4})
    peaks = [
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla V100-SXM2-32GB", "tf32", 15.7),  # which has none and computes in float32
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
    ]
    for name, precision, peak in peaks:
        assert peak_of(name, precision) == peak
    assert peak_memory(torch.device("cpu")) > psutil.Process().memory_info().rss / 2


# --- Weights & Biases -----------------------------------------------------------------------------


def kept_in(folder: Path) -> list[tuple[str, int]]:
    """Of the runs below SAVE/wandb, the oldest first: its id and how many losses it holds.

    Each stands in the history and in the summary.
    """
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    return [
        (file.stem.removeprefix("run-"), file.read_bytes().count(b"train/loss")) for file in files
    ]


def test_a_run_holds_every_record_and_goes_on_when_it_is_resumed(
    grid, corpus, tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    train(settings(corpus, tmp_path, *WANDB, "exit_interval=4"), grid)
    train(settings(corpus, tmp_path, "train_iters=6"), grid)  # without Weights & Biases
    train(settings(corpus, tmp_path, *WANDB), grid)
    run_id = read_record(tmp_path / "global_step8")["wandb"]
    assert kept_in(tmp_path) == [(run_id, 2 * 4), (run_id, 2 * 2)]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not any("use_wandb" in warning for warning in warnings)


def test_a_server_that_cannot_be_used_costs_one_warning(tmp_path, caplog, monkeypatch):
    def refused(**_):
        raise ConnectionError("no server answers")

    monkeypatch.setattr("wandb.init", refused)
    log = Metrics(tmp_path, Logging(use_wandb=True), {}, run_id="abcd1234")
    log.log(1, "train", {"loss": 1.0})
    log.close()
    assert caplog.messages == [
        "use_wandb: cannot start (no server answers) - the run continues without it; check that the"
        " package is installed and its server answers, or set WANDB_MODE=offline to keep the"
        " records for `wandb sync`"
    ]
    assert records_of(tmp_path / "metrics.jsonl")[0]["loss"] == 1.0
