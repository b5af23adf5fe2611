"""tools/sweep.py as it is used: killed again and again, with a run that fails, through Slurm."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatron.results.files import existing_results, write_results
from megatron.sweeps.lock import held
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.run import Runner, environment_at, places_of
from megatron.sweeps.state import collect, state_of
from tests.support import run
from tests.sweeps.conftest import STEPS, SWEEP, TABLE, command, rows

KILLS = {"metrics.jsonl": 8, "evaluation/*.jsonl": 3}  # how often, and after which file was written


def losses(folder: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (folder / "good-1/metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def test_a_run_that_fails_is_shown_with_its_reason_and_the_others_go_on(file, whole):
    folder, done = whole
    assert "good-1: done" in done.stdout
    assert len(rows(folder)) == 6  # two protocols, three lengths
    assert rows(folder)[0]["cell"] == {"data": "good", "seed": 1}
    status = command("sweep", "status", file, "--folder", folder)
    assert status.returncode == 1
    _, good, absent = status.stdout.splitlines()
    assert good == "good-1    done"
    assert absent.startswith(f"absent-1  failed at step 0 of {STEPS}: ")
    assert "_of_nobody" in absent


def test_a_run_that_ends_with_missing_cells_says_which_and_has_status_1(whole):
    _, done = whole
    assert done.returncode == 1
    missing, absent = done.stderr.splitlines()[-2:]
    assert missing == "1 of 2 cells are missing:"
    assert absent.startswith(f"  absent-1: failed at step 0 of {STEPS}: ")


def test_a_finished_cell_keeps_its_weights_and_no_optimizer_states(whole):
    folder, _ = whole
    kept = {path.name for path in (folder / f"good-1/global_step{STEPS}").iterdir()}
    assert kept == {"checkpoint.json", "config.yml", "model.safetensors"}


@pytest.mark.campaign
def test_a_sweep_killed_at_random_moments_has_the_results_of_an_undisturbed_one(file, whole, warm):
    folder = file.parent / "killed"
    words = ["run", file, "--folder", folder]
    sweep, kills = load_sweep(file, folder), 0
    for pattern, count in KILLS.items():
        kills += sum(killed(warm, words, folder / "good-1", pattern) for _ in range(count))
        in_time = state_of(sweep.cells[0]).kind != "done" or "eval" in pattern
        assert in_time, "too fast for this test"
    assert kills >= 10
    Runner([None], lambda text: None).run(sweep)
    collect(sweep)
    assert rows(folder) == rows(whole[0])
    assert losses(folder) == losses(whole[0])


def killed(warm, words: list, folder: Path, pattern: str) -> bool:
    """Run a sweep until a while after it has written such a file, then kill it with its scripts."""
    before = written(folder, pattern)
    pid = warm.start(*words)
    while warm.poll() is None and written(folder, pattern) == before:
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.1))
    alive = warm.poll() is None
    if alive:
        os.killpg(pid, signal.SIGKILL)
    assert warm.poll(60) is not None
    while not free(folder):  # until what was killed is gone
        time.sleep(0.005)
    return alive


def free(folder: Path) -> bool:
    with held(folder) as lock:
        return lock is not None


def written(folder: Path, pattern: str) -> set[tuple[str, int]]:
    """Names and ages of files."""
    ages = set()
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            ages.add((path.name, path.stat().st_mtime_ns))
    return ages


def test_a_folder_with_another_run_is_refused_and_a_cell_at_work_left_alone(file, whole, tmp_path):
    other = tmp_path / "tiny.yml"
    other.write_text(file.read_text().replace("hidden_size: 16", "hidden_size: 32"))
    (cell, *_) = load_sweep(other, whole[0]).cells
    state = state_of(cell)
    assert (state.kind, state.step) == ("foreign", STEPS)
    assert cell.config.hash in state.note
    messages: list[str] = []
    sweep = load_sweep(file, tmp_path / "busy", only=["data=good"])
    with held(sweep.cells[0].folder):
        Runner([None], messages.append).run(sweep)
    assert messages == ["good-1: another process is at work on it"]


class Exits(Runner):
    """A runner whose work on one cell ends as a user's own file may end it."""

    def _do(self, cell, place, lock, keep_states) -> None:
        if cell.name == "good-1":
            raise SystemExit(0)
        super()._do(cell, place, lock, keep_states)


def test_a_cell_that_ends_its_thread_is_named_and_the_others_are_tried(file, tmp_path):
    messages: list[str] = []
    sweep = load_sweep(file, tmp_path / "runs")
    runner = Exits([None], messages.append)
    with held(sweep.cells[1].folder):
        runner.run(sweep)
    assert runner.failed == ["good-1"]
    assert messages[0].startswith("good-1: failed: internal error: SystemExit: 0 (test_run.py:")
    assert messages[1] == "absent-1: another process is at work on it"
    assert state_of(sweep.cells[0]).kind == "failed"


def test_a_damaged_checkpoint_fails_its_cell_alone(file, tmp_path):
    folder = tmp_path / "runs"
    checkpoint = folder / "good-1" / "global_step5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{")
    with held(folder / "absent-1"):
        done = command("sweep", "run", file, "--folder", folder)
    assert done.returncode == 1
    assert "good-1: failed: " in done.stdout
    assert "absent-1: another process is at work on it" in done.stdout
    _, good, _ = done.stderr.splitlines()
    assert good.startswith(f"  good-1: damaged: {checkpoint}/checkpoint.json: ")


def test_a_cell_that_ends_early_and_well_has_failed_and_keeps_its_optimizer_state(
    file, warm, tmp_path
):
    early = tmp_path / "tiny.yml"
    early.write_text(file.read_text().replace("settings: {", "settings: {exit_interval: 5, "))
    folder, printed = tmp_path / "runs", tmp_path / "printed"
    warm.start("run", early, "--folder", folder, "--only", "data=good", output=printed)
    assert warm.poll(120) == 1
    note = "good-1: failed: training ended early, as exit_interval or exit_duration says"
    assert note in printed.read_text()
    (cell,) = load_sweep(early, folder, only=["data=good"]).cells
    assert (state_of(cell).kind, state_of(cell).step) == ("failed", 5)
    assert list(cell.folder.glob("global_step5/*_states.pt"))
    assert not (cell.folder / "evaluation").exists()


def test_a_full_disk_stops_a_sweep_with_one_message(file, tmp_path, monkeypatch):
    messages: list[str] = []
    sweep = load_sweep(file, tmp_path / "runs")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cell.yml")
    monkeypatch.setattr("megatron.sweeps.run.state_of", raises(full))
    runner = Runner([None], messages.append)
    runner.run(sweep)
    assert len(messages) == 1
    assert "good-1: failed: [Errno 28] No space left on device: 'cell.yml'" in messages[0]
    assert runner.failed == ["good-1"]


def raises(fault: Exception):
    def function(*_: object) -> None:
        raise fault

    return function


def test_a_training_does_not_outlive_a_killed_sweep(file, warm, tmp_path):
    folder = tmp_path / "runs" / "good-1"
    pid = warm.start("run", file, "--folder", tmp_path / "runs", "--only", "data=good")
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert warm.poll() is None
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert warm.poll(60) == -signal.SIGKILL
    end = time.monotonic() + 10
    while not free(folder):
        assert time.monotonic() < end, "a training goes on"
        time.sleep(0.01)


def test_slurm_gets_an_array_of_what_is_missing(file, whole, tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/sent.sh\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--launcher", "slurm", "--sbatch=--partition=long", "--sbatch=--mem=1G"]
    sent = command("sweep", "run", file, "--folder", tmp_path / "runs", *words, "--keep-states")
    assert sent.returncode == 0, sent.stderr
    script = (tmp_path / "sent.sh").read_text()
    assert "#SBATCH --array=0-1\n" in script
    assert "#SBATCH --partition=long\n#SBATCH --mem=1G\n" in script
    # Without B: the signal goes to the steps of a script, and this one has none.
    assert "#SBATCH --signal=B:TERM@120\n" in script
    assert " --keep-states --only " in script
    (tmp_path / "here.sh").write_text(script.replace(str(tmp_path / "runs"), str(whole[0])))
    done = run(
        "-c",
        f"import os; os.execvp('bash', ['bash', '{tmp_path}/here.sh'])",
        env={"SLURM_ARRAY_TASK_ID": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "1 cells, 1 done" in done.stdout


def test_without_sbatch_the_script_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    done = command("sweep", "run", file, "--folder", tmp_path / "runs", "--launcher", "slurm")
    assert done.returncode == 0
    script = tmp_path / "runs" / "slurm.sh"
    assert f"sbatch is not on this machine; the array of 2 jobs is in {script}" in done.stdout
    assert "--keep-states" not in script.read_text()


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_a_number_of_jobs_is_at_least_one(file, jobs):
    wrong = command("sweep", "run", file, f"--jobs={jobs}", "--dry-run")
    assert wrong.returncode == 2
    assert f"--jobs: {jobs} is no number of runs: give 1 or more" in wrong.stderr


def test_places_are_the_devices_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert places_of(None) == ["2", "3"]
    assert places_of(3) == ["2", "3", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert places_of(None) == ["0", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert places_of(None) == [None]


def test_runs_that_share_the_cores_are_given_threads_and_a_single_one_chooses(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environment_at(None, 1)
    assert environment_at("3", 2)["OMP_NUM_THREADS"] == "4"
    assert environment_at("3", 2)["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment_at(None, 20)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment_at(None, 2)["OMP_NUM_THREADS"] == "5"


def test_facts_of_an_absent_corpus_are_those_of_earlier_results(corpus, file, whole, tmp_path):
    # The same configurations but for the place of the text, which is then removed.
    text = tmp_path / "text"
    for end in (".idx", ".bin", ".json"):
        if Path(f"{corpus}{end}").exists():
            shutil.copy(f"{corpus}{end}", f"{text}{end}")
    here = tmp_path / "tiny.yml"
    here.write_text(SWEEP.format(corpus=text, steps=STEPS))
    folder = tmp_path / "runs"
    adopt(load_sweep(file, whole[0], ["data=good"]), load_sweep(here, folder, ["data=good"]))
    assert command("sweep", "collect", here, "--folder", folder).returncode == 0
    before = rows(folder)
    assert before[0]["corpus_tokens"] > 0
    Path(f"{text}.idx").unlink()
    (folder / "good-1/metrics.jsonl").unlink()
    assert command("sweep", "collect", here, "--folder", folder).returncode == 0
    assert rows(folder) == before


def adopt(there, here) -> None:
    """Make one sweep's only cell another's, whose configuration may have another hash."""
    (old,), (new,) = there.cells, here.cells
    shutil.copytree(old.folder, new.folder)
    record = new.folder / f"global_step{new.steps}/checkpoint.json"
    record.write_text(record.read_text().replace(old.config.hash, new.config.hash))
    for before, after in zip(old.evaluations, new.evaluations, strict=True):
        measured = existing_results(old.file(before))
        write_results(new.file(after), [row | {"config_hash": new.config.hash} for row in measured])


def test_a_folder_of_other_runs_and_rows_of_no_cell_are_named(whole):
    folder = whole[0]
    done = command("reproduce", "kerple-table5", "--folder", folder)
    assert f"{folder}: holds other runs than kerple_table5.yml's: absent-1, good-1" in done.stdout
    done = command("reproduce", "kerple-table5", "--results", folder / "results.jsonl")
    assert "6 of 6 rows match no cell" in done.stdout


def test_a_table_of_ones_own_stands_beside_what_its_sweep_measured(file, whole):
    table = file.with_name("mine.table.yml")
    table.write_text(TABLE)
    done = command("reproduce", table, "--folder", whole[0])
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    measured = {
        row["length"]: row["perplexity"] for row in rows(whole[0]) if row["protocol"] == "paper"
    }
    for length, paper, form in ((32, 20.0, "20.0 ± 1.5 {:.1f}"), (64, 20.0, "20.00 {:.2f}")):
        ours = measured[length]
        assert f"good kerple_log {length} {form.format(ours)} 1 {ours - paper:+.4g}" in lines
    assert f"good kerple_log 128 out of memory {measured[128]:.2f} 1" in lines
    assert "good kerple_log 256 1.0 missing" in lines
    assert "good alibi 32 3.0 missing" in lines
    assert "3 of 5 cells have our numbers" in lines


def test_results_of_another_sweep_are_neither_replaced_nor_emptied(file, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text("rows\n")
    collected = command("sweep", "collect", file, "--folder", tmp_path)
    assert (collected.returncode, results.read_text()) == (1, "rows\n")
    assert "holds rows, and" in collected.stderr
    reproduced = command("reproduce", "kerple-table5", "--folder", tmp_path)
    assert results.read_text() == "rows\n"
    assert reproduced.stdout.count("missing") == 36
