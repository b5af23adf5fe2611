"""tools/sweep.py as it is used: stopped, killed, with a run that fails."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from megatron.sweeps.cells import collect, load_sweep, state_of
from megatron.sweeps.runner import Runner, places_of
from tests.support import call
from tests.sweeps.conftest import STEPS, SWEEP, TABLE, WARM, rows

KILLS = {"metrics.jsonl": 8, "evaluation/*.jsonl": 3}  # how often, and after which file was written


def test_a_run_that_fails_is_shown_with_its_reason_and_the_others_go_on(file, whole):
    folder, done = whole
    assert "good-1: done" in done.stdout
    assert len(rows(folder)) == 6  # two protocols, three lengths
    assert rows(folder)[0]["cell"] == {"data": "good", "seed": 1}
    assert rows(folder)[0]["corpus_tokens"] > 0
    missing, absent = done.stderr.splitlines()[-2:]
    assert missing == "1 of 2 cells are missing:"
    assert absent.startswith(f"  absent-1: failed at step 0 of {STEPS}: ")
    status = call("tools/sweep.py", "status", file, "--folder", folder)
    assert status.returncode == 1
    _, good, absent = status.stdout.splitlines()
    assert good == "good-1    done"
    assert "_of_nobody" in absent
    results, before = folder / "results.jsonl", rows(folder)
    results.unlink()
    collected = call("tools/sweep.py", "collect", file, "--folder", folder)
    assert collected.stdout == f"6 rows in {results}\n"
    assert rows(folder) == before
    rest = call("tools/sweep.py", "status", file, "--folder", folder, "--skip", results)
    assert rest.stdout.splitlines()[0].startswith("tiny: 1 cells, 1 failed")
    # A finished cell keeps its weights and no optimizer states.
    names = {path.name for path in (folder / f"good-1/global_step{STEPS}").iterdir()}
    assert names == {"checkpoint.json", "config.yml", "model.safetensors"}

    other = file.with_name("other") / "tiny.yml"
    other.parent.mkdir()
    other.write_text(file.read_text().replace("hidden_size: 16", "hidden_size: 32"))
    (cell, *_) = load_sweep(other, folder).cells
    state = state_of(cell)
    assert (state.kind, state.step) == ("damaged", STEPS)
    assert cell.config.hash in state.note


@pytest.mark.campaign
def test_a_sweep_killed_at_random_moments_has_the_results_of_an_undisturbed_one(file, whole, forks):
    folder = file.parent / "killed"
    cell, kills = load_sweep(file, folder).cells[0], 0
    for pattern, count in KILLS.items():
        for _ in range(count):
            before = written(cell.folder, pattern)
            pid = forks.start(WARM, "run", file, "--folder", folder, log=Path(os.devnull))
            while forks.poll(pid) is None and written(cell.folder, pattern) == before:
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.1))
            if forks.poll(pid) is None:
                kills += 1
                os.kill(pid, signal.SIGKILL)
                assert forks.wait(pid, 60) == -signal.SIGKILL
        in_time = state_of(cell).kind != "done" or "eval" in pattern
        assert in_time, "too fast for this test"
    assert kills >= 10
    sweep = load_sweep(file, folder)
    Runner(lambda text: None).run(sweep.cells, [{}])
    collect(sweep)
    assert rows(folder) == rows(whole[0])
    assert losses(folder) == losses(whole[0])


def written(folder, pattern):
    """Names and ages of files."""
    ages = set()
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            ages.add((path.name, path.stat().st_mtime_ns))
    return ages


def losses(folder):
    records = map(json.loads, (folder / "good-1/metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_a_sweep_or_its_terminal_ends_its_trainings(corpus, forks, tmp_path, number):
    sweep_file = tmp_path / "long.yml"
    text = SWEEP.format(corpus=corpus, steps=100000)
    sweep_file.write_text(text.replace("save_interval: 15", "save_interval: 0"))
    words = ["run", sweep_file, "--folder", tmp_path / "runs", "--only", "data=good"]
    (cell,) = load_sweep(sweep_file, tmp_path / "runs", ["data=good"]).cells
    pid = forks.start(WARM, *words, log=tmp_path / "log")
    try:
        while not (cell.folder / "metrics.jsonl").exists():
            time.sleep(0.05)
        # A terminal signals all of a group.
        os.killpg(pid, number) if number == signal.SIGINT else os.kill(pid, number)
        status = forks.wait(pid, 60)
        end = time.monotonic() + (10 if number == signal.SIGKILL else 0)
        while not trainable(cell.folder):
            assert time.monotonic() < end, "a training outlived its sweep"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    state = state_of(cell)
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert (status, state.kind) == (130, "stopped")
        assert 0 < state.step < 100000, "with a checkpoint"


def trainable(folder):
    """Whether no training owns a folder."""
    try:
        with owned_folder(folder, "save"):
            return True
    except UserError:
        return False


def test_a_cell_that_fails_is_named_and_the_others_are_tried(file, tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    messages: list[str] = []
    sweep = load_sweep(file, tmp_path)
    monkeypatch.setattr(type(sweep.cells[0].config), "save", failing)
    Runner(messages.append).run(sweep.cells, [{}])
    failed = [message.split(":")[0] for message in messages if ": failed: " in message]
    assert failed == ["good-1", "absent-1"]
    assert state_of(sweep.cells[0]).kind == "failed"


def test_a_cell_that_ends_early_and_well_has_failed_and_keeps_its_optimizer_state(
    file, forks, tmp_path
):
    early = tmp_path / "tiny.yml"
    early.write_text(file.read_text().replace("settings: {", "settings: {exit_interval: 5, "))
    folder = tmp_path / "runs"
    done = forks.run(WARM, "run", early, "--folder", folder, "--only", "data=good")
    assert done.returncode == 1
    note = "good-1: failed: training ended early because of exit_interval or exit_duration"
    assert note in done.stdout
    (cell,) = load_sweep(early, folder, only=["data=good"]).cells
    assert (state_of(cell).kind, state_of(cell).step) == ("failed", 5)
    assert (cell.folder / "global_step5/optimizer.safetensors").exists()
    assert not (cell.folder / "evaluation").exists()


def test_each_place_is_a_device_of_this_process_and_shares_its_cores(monkeypatch):
    def devices(jobs):
        return [place.get("CUDA_VISIBLE_DEVICES") for place in places_of(jobs)]

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert devices(3) == ["2", "3", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices(None) == ["0", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert places_of(None) == [{}]
    assert places_of(2) == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert places_of(2) == [{"OMP_NUM_THREADS": "5"}] * 2


def test_a_table_of_ones_own_stands_beside_what_its_sweep_measured(file, whole, monkeypatch):
    def in_this_process(command, check):
        done = call(*command[1:])
        sys.stderr.write(done.stderr)
        return done

    monkeypatch.setattr(subprocess, "run", in_this_process)
    folder = whole[0]
    table = file.with_name("table") / "mine.yml"
    table.parent.mkdir()
    table.write_text(TABLE)
    alone = file.read_text().replace(", absent: {", "}\n# {")  # the cell that is done
    table.with_name("tiny.yml").write_text(alone)
    done = call("tools/reproduce.py", table, "--folder", folder, "--run")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    measured = {
        row["length"]: row["perplexity"] for row in rows(folder) if row["protocol"] == "paper"
    }
    for length, paper, form in ((32, 20.0, "20.0 ± 1.5 {:.2f}"), (64, 20.0, "20.00 {:.2f}")):
        ours = measured[length]
        assert f"good kerple_log {length} {form.format(ours)} 1 {ours - paper:+.4g}" in lines
    assert f"good kerple_log 128 out of memory {measured[128]:.2f} 1" in lines
    assert "good kerple_log 256 1.0 missing" in lines
    assert "3 of 5 cells have our numbers" in lines
    done = call("tools/reproduce.py", "kerple-table5", "--folder", folder)
    assert "missing cells have no rows in" in done.stdout  # those there are of another sweep
    done = call("tools/reproduce.py", "kerple-table5", "--folder", file.parent / "new", "--run")
    assert done.returncode == 1
    assert "arxiv_text_document - python prepare_data.py -d data arxiv (sizes" in done.stderr
    assert not (file.parent / "new").exists()
