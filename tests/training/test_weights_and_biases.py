"""Weights & Biases stops no run and keeps nobody waiting; a resumed run is the same one there."""

import threading

import psutil
import pytest
import torch

from megatron.checkpoints.manifest import read_record, write_record
from megatron.config.schema import Logging
from megatron.errors import UserError
from megatron.training import records as written
from megatron.training import weights_and_biases
from megatron.training.metrics import Metrics
from megatron.training.records import InBackground, Record, Spared
from megatron.training.run import train
from megatron.training.sent import send_results
from megatron.training.weights_and_biases import NAME, Wandb
from tests.support import call
from tests.training.conftest import copy_of, settings
from tests.wandb_files import kept_in, server

NOBODY = "http://127.0.0.1:9"  # the port `discard`, at which nothing listens
SENT = ["use_wandb=true", "wandb_project=tiny"]
RUN = "abcd1234"


@pytest.fixture
def online(monkeypatch, tmp_path):
    """As for a user who has a key. Nothing is read from this machine's own settings."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def warned(caplog) -> list[str]:
    """What this project warned of; wandb's own log goes to a file."""
    return [
        entry.getMessage()
        for entry in caplog.records
        if entry.name.startswith("megatron") and entry.levelname == "WARNING"
    ]


def metrics(folder, host: str | None = None) -> Metrics:
    return Metrics(folder, Logging(use_wandb=True, wandb_host=host), {"seed": 1}, run_id=RUN)


def test_a_run_holds_every_number_and_a_histogram_of_those_that_are_learned(
    offline, grid, corpus, tmp_path, caplog
):
    train(settings(corpus, tmp_path, *SENT, "train_iters=4", "save_interval=0"), grid)
    (kept,) = kept_in(tmp_path)
    assert [record["step"] for record in kept.history] == [1, 2, 3, 4]
    last = kept.history[-1]
    assert last["train/loss"] > 0
    assert last["position/kernels.1.p/_type"] == "histogram"
    assert sum(last["position/kernels.1.p/values"]) == 4  # heads
    edges = last["position/kernels.1.p/bins"]
    assert last["position/kernels.1.p/mean"] == pytest.approx(sum(edges) / len(edges), abs=1)
    assert (edges[0], edges[-1]) == pytest.approx(
        (last["position/kernels.1.p/min"], last["position/kernels.1.p/max"])
    )
    assert not [text for text in warned(caplog) if text.startswith(NAME)]
    assert read_record(tmp_path / "global_step4")["wandb"] == kept.id
    assert not kept.artifacts


def test_a_resumed_run_is_the_same_there_and_a_finetuned_one_is_new(
    offline, grid, corpus, tmp_path
):
    first, second = tmp_path / "first", tmp_path / "second"
    train(settings(corpus, first, *SENT, "exit_interval=4"), grid)
    train(settings(corpus, first, "train_iters=6"), grid)  # without Weights & Biases
    train(settings(corpus, first, *SENT), grid)
    before, after = kept_in(first)
    assert before.id == after.id == read_record(first / "global_step8")["wandb"]
    assert [record["step"] for record in before.history + after.history] == [1, 2, 3, 4, 7, 8]

    tuned = [*SENT, f"load={first}", "finetune=true", "train_iters=2", "save_interval=1"]
    train(settings(corpus, second, *tuned, "exit_interval=1"), grid)
    train(settings(corpus, second, *tuned), grid)
    new, again = kept_in(second)
    assert new.id == again.id != before.id


def test_files_are_sent_where_the_configuration_says_so(offline, grid, corpus, tmp_path):
    sent = [*SENT, "wandb_artifacts=true", "profile=true", "profile_step_start=2"]
    train(settings(corpus, tmp_path, *sent, "profile_step_stop=3", "train_iters=4"), grid)
    (training,) = kept_in(tmp_path)
    assert training.artifacts["training"] == [
        "learned.table.json",
        "metrics.jsonl",
        "step2-3_rank0.trace.json.gz",
        "step2-3_rank0.txt",
    ]
    assert training.history[-1]["learned/nrows"] == 4 * 2 * 4  # steps, parameters, heads

    done = call("evaluate.py", "--checkpoint", tmp_path, "--lengths", 64, "eval_tokens=256")
    assert done.returncode == 0, done.stderr
    _, evaluation = kept_in(tmp_path)
    assert evaluation.id == training.id
    stem = "tiny_text_document-valid-global_step4"
    assert evaluation.artifacts["evaluation"] == [
        "evaluation.table.json",
        f"{stem}.jsonl",
        f"{stem}.png",
    ]
    assert evaluation.history[-1]["step"] == 4
    assert evaluation.history[-1]["evaluation/nrows"] == 1
    assert evaluation.history[-1][f"{stem}/_type"] == "image-file"


def test_a_server_that_nobody_reaches_costs_one_warning(online, tmp_path, caplog):
    log = metrics(tmp_path, NOBODY)
    log.log(1, "train", {"loss": 1.0}, {"slope": torch.ones(3)})
    log.close()
    assert warned(caplog) == [
        f"use_wandb: the server cannot be used ({NOBODY} cannot be reached) - the run goes on; the"
        f" records are kept in {tmp_path}/wandb, and `wandb sync` sends them later"
    ]
    (kept,) = kept_in(tmp_path)
    assert kept.id == RUN
    assert [record["train/loss"] for record in kept.history] == [1.0]


@pytest.mark.parametrize(
    ("status", "words"), [(401, "logged in"), (403, "logged in"), (200, "'<'")]
)
def test_a_wrong_key_or_answer_costs_one_warning(online, tmp_path, caplog, status, words):
    with server(status) as (address, _):
        log = metrics(tmp_path, address)
        log.log(1, "train", {"loss": 1.0})
        log.close()
    assert len(warned(caplog)) == 1
    assert warned(caplog)[0].startswith("use_wandb: the server cannot be used (")
    assert words in warned(caplog)[0]
    assert kept_in(tmp_path)[-1].history[0]["train/loss"] == 1.0


def test_no_key_asks_no_terminal(online, tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    with server(401) as (address, asked):
        log = metrics(tmp_path, address)
        log.close()
    assert not asked.is_set()
    assert len(warned(caplog)) == 1
    assert "the server cannot be used (No API key configured." in warned(caplog)[0]


def test_nothing_waits_for_a_server_that_never_answers(online, tmp_path, caplog, monkeypatch):
    """Records are handed over while the server still holds the first question."""
    monkeypatch.setattr(weights_and_biases, "STARTS", 3)
    with server(None) as (address, asked):
        log = metrics(tmp_path, address)
        for step in range(1, 6):
            log.log(step, "train", {"loss": float(step)})
        background = log.logs[-1].log
        assert isinstance(background, InBackground)
        assert background.waiting.qsize() == 5, "the thread took a record before it had started"
        assert asked.wait(30)
        assert background.waiting.qsize() == 5
        log.close()
    assert len(warned(caplog)) == 1
    assert warned(caplog)[0].startswith("use_wandb: the server cannot be used (")
    assert [record["step"] for record in kept_in(tmp_path)[-1].history] == [1, 2, 3, 4, 5]


def test_a_missing_package_costs_one_warning(grid, corpus, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(weights_and_biases.importlib.util, "find_spec", lambda name: None)
    train(settings(corpus, tmp_path, *SENT, "train_iters=2"), grid)
    about = [text for text in warned(caplog) if text.startswith(NAME)]
    assert about == [
        "use_wandb: cannot start (the package wandb is not installed: pip install wandb) - the run"
        " goes on without it"
    ]
    assert (tmp_path / "global_step2").is_dir()


class Stuck:
    """A log whose service is stuck until the event."""

    def __init__(self, released: threading.Event) -> None:
        self.released = released
        self.steps: list[int] = []

    def write(self, record: Record) -> None:
        assert self.released.wait(30)
        self.steps.append(record.step)
        record.learned["slope"] += 1

    def close(self) -> None:
        """Nothing is buffered."""


def test_a_stuck_log_takes_no_more_records_than_fit_and_is_left_at_the_end(caplog, monkeypatch):
    monkeypatch.setattr(written, "MOST_WAITING", 3)
    released = threading.Event()
    stuck = Stuck(released)
    background = InBackground("stuck", lambda: stuck, patience=0.2)
    log = Spared(background, "stuck")
    slope = torch.zeros(2)
    log.write(Record(1, "train", {}, {"slope": slope}))
    while background.waiting.qsize():  # until the thread has taken it
        pass
    for step in range(2, 7):
        log.write(Record(step, "train", {}, {"slope": slope}))
    log.close()
    assert warned(caplog) == [
        "stuck: step 5 could not be written (3 records wait already) - training goes on, and later"
        " records are tried again",
        "stuck: could not be closed (not ready after 0.2 seconds)",
        "stuck: 2 record(s) were lost",
    ]
    released.set()
    background.thread.join(30)
    assert stuck.steps == [1, 2, 3, 4]
    assert slope.tolist() == [0, 0], "a record shares memory with the training"


def test_files_that_cannot_be_read_are_one_warning(offline, tmp_path, caplog):
    settings = Logging(use_wandb=True, wandb_artifacts=True)
    log = Metrics(tmp_path, settings, {}, run_id=RUN)
    log.log(1, "train", {"loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    log.close()
    assert warned(caplog) == ["use_wandb: its files are not sent (No such file or directory)"]
    (kept,) = kept_in(tmp_path)
    assert kept.history[0]["train/loss"] == 1.0


def test_a_network_that_is_lost_costs_one_warning(offline, tmp_path, caplog):
    """What a run that cannot send within its time raises when it ends is a message."""
    log = Wandb(Logging(use_wandb=True), {}, tmp_path, RUN)
    folder = log.run.settings.sync_dir
    finish = log.run.finish

    def late() -> None:
        finish()
        raise TimeoutError("Timed out finishing run.")

    log.run.finish = late
    log.close()
    assert warned(caplog) == [
        f"use_wandb: not all was sent within 30 seconds - `wandb sync {folder}` sends it later"
    ]


def test_a_service_that_dies_costs_records_and_no_run(offline, tmp_path, caplog):
    log = Spared(Wandb(Logging(use_wandb=True), {}, tmp_path, RUN), NAME)
    log.write(Record(1, "train", {"loss": 1.0}))
    assert log.lost == 0
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith("wandb"):
            child.kill()
            child.wait(10)
    for step in range(2, 5):
        log.write(Record(step, "train", {"loss": 1.0}))
    log.close()
    assert log.lost
    assert warned(caplog)[-1] == f"use_wandb: {log.lost} record(s) were lost"


def test_an_id_that_cannot_be_is_refused(trained, tmp_path, grid, corpus):
    folder = copy_of(trained, tmp_path)
    path = folder / "global_step4"
    write_record(path, read_record(path) | {"wandb": "../../elsewhere"})
    with pytest.raises(UserError, match=r"wandb is '../../elsewhere', which cannot be"):
        train(settings(corpus, folder, *SENT), grid)


def test_results_of_a_checkpoint_that_was_removed_are_not_sent(tmp_path, caplog):
    row = {"checkpoint": str(tmp_path / "global_step4"), "length": 64}
    asked = Logging(use_wandb=True, wandb_artifacts=True)
    send_results({tmp_path / "rows.jsonl": [row]}, asked)
    assert len(warned(caplog)) == 1
    assert warned(caplog)[0].startswith("use_wandb: nothing is sent (")
