"""tools/sweep.py as it is used: stopped, killed, with a run that fails, through Slurm."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from megatron.results.files import existing_results, write_results
from megatron.sweeps.cells import collect, load_sweep, state_of
from megatron.sweeps.runner import Runner, environment_at, places_of
from tests.support import ROOT, run
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
    assert done.returncode == 1
    missing, absent = done.stderr.splitlines()[-2:]
    assert missing == "1 of 2 cells are missing:"
    assert absent.startswith(f"  absent-1: failed at step 0 of {STEPS}: ")
    status = command("sweep", "status", file, "--folder", folder)
    assert status.returncode == 1
    _, good, absent = status.stdout.splitlines()
    assert good == "good-1    done"
    assert "_of_nobody" in absent
    # A finished cell keeps its weights and no optimizer states.
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
    return alive


def written(folder: Path, pattern: str) -> set[tuple[str, int]]:
    """Names and ages of files."""
    ages = set()
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            ages.add((path.name, path.stat().st_mtime_ns))
    return ages


class Cold:
    """The command as a shell starts it."""

    def start(self, *words: object) -> int:
        # Under nohup this process ignores SIGHUP, and so would its children.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [sys.executable, str(ROOT / "tools/sweep.py"), *map(str, words)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        signal.signal(signal.SIGHUP, before)
        return self.process.pid

    def poll(self, timeout: float = 0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode


@pytest.mark.parametrize(
    ("how", "number", "send"),
    [
        ("warm", signal.SIGINT, os.kill),
        ("cold", signal.SIGINT, os.killpg),
        ("warm", signal.SIGHUP, os.killpg),
        ("warm", signal.SIGTERM, os.kill),
        ("warm", signal.SIGKILL, os.kill),
    ],
)
def test_a_signal_to_a_sweep_or_its_terminal_ends_its_trainings(
    corpus, warm, tmp_path, how, number, send
):
    text = SWEEP.format(corpus=corpus, steps=100000)
    here = tmp_path / "long.yml"
    here.write_text(text.replace("save_interval: 15", "save_interval: 0"))
    (cell,) = load_sweep(here, tmp_path / "runs", ["data=good"]).cells
    sweep = warm if how == "warm" else Cold()
    pid = sweep.start("run", here, "--folder", tmp_path / "runs", "--only", "data=good")
    try:
        while sweep.poll() is None and not (cell.folder / "metrics.jsonl").exists():
            time.sleep(0.05)
        send(pid, number)
        status = sweep.poll(60)
        end = time.monotonic() + (10 if number == signal.SIGKILL else 0)
        while not trainable(cell.folder):
            assert time.monotonic() < end, "a training outlived its sweep"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    state = state_of(cell)
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert (status, state.kind) == (130, "stopped")
        assert 0 < state.step < 100000, "with a checkpoint"


def trainable(folder: Path) -> bool:
    """Whether no training owns a folder."""
    try:
        with owned_folder(folder, "save"):
            return True
    except UserError:
        return False


def test_a_folder_with_another_run_is_refused(file, whole, tmp_path):
    other = tmp_path / "tiny.yml"
    other.write_text(file.read_text().replace("hidden_size: 16", "hidden_size: 32"))
    (cell, *_) = load_sweep(other, whole[0]).cells
    state = state_of(cell)
    assert (state.kind, state.step) == ("foreign", STEPS)
    assert cell.config.hash in state.note


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        (SystemExit(0), "internal error: SystemExit: 0 (test_runner.py:"),
        (UserError("damaged"), "damaged"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "[Errno 28] No space left on device"),
    ],
)
def test_a_cell_that_fails_is_named_and_the_others_are_tried_unless_the_disk_is_full(
    file, tmp_path, monkeypatch, fault, note
):
    def do(self, cell, place, keep_states):
        raise fault

    monkeypatch.setattr(Runner, "_do", do)
    messages: list[str] = []
    sweep = load_sweep(file, tmp_path / "runs")
    runner = Runner([None], messages.append)
    runner.run(sweep)
    assert messages[0].startswith(f"good-1: failed: {note}")
    is_full = isinstance(fault, OSError)
    assert runner.failed == (["good-1"] if is_full else ["good-1", "absent-1"])
    assert state_of(sweep.cells[0]).kind == "failed"


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


def test_slurm_gets_an_array_of_what_is_missing(file, whole, tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    words = ["--launcher", "slurm", "--sbatch=--partition=long", "--sbatch=--mem=1G"]
    words = ["run", file, "--folder", tmp_path / "runs", *words, "--keep-states"]
    absent = command("sweep", *words)
    place = f"the array of 2 jobs is in {tmp_path}/runs/slurm.sh"
    assert f"sbatch is not on this machine; {place}" in absent.stdout
    sbatch.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/sent.sh\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert command("sweep", *words).returncode == 0
    script = (tmp_path / "sent.sh").read_text()
    assert "#SBATCH --array=0-1\n" in script
    assert "#SBATCH --partition=long\n#SBATCH --mem=1G\n" in script
    # Without B: the signal goes to the steps of a script, and this one has none.
    assert "#SBATCH --signal=B:TERM@120\n" in script
    assert " --keep-states --only " in script
    (tmp_path / "here.sh").write_text(script.replace(str(tmp_path / "runs"), str(whole[0])))
    start = f"import os; os.execvp('bash', ['bash', '{tmp_path}/here.sh'])"
    done = run("-c", start, env={"SLURM_ARRAY_TASK_ID": "0"})
    assert done.returncode == 0, done.stderr
    assert "1 cells, 1 done" in done.stdout


def test_each_place_is_a_device_of_this_process_and_shares_its_cores(file, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert places_of(None) == ["2", "3"]
    assert places_of(3) == ["2", "3", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert places_of(None) == ["0", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert places_of(None) == [None]
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environment_at(None, 1)
    environment = environment_at("3", 2)
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("4", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment_at(None, 2)["OMP_NUM_THREADS"] == "5"
    wrong = command("sweep", "run", file, "--jobs=0", "--dry-run")
    assert wrong.returncode == 2
    assert "--jobs: 0" in wrong.stderr


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


def test_a_table_of_ones_own_stands_beside_what_its_sweep_measured(file, whole):
    folder = whole[0]
    table = file.with_name("mine.table.yml")
    table.write_text(TABLE)
    done = command("reproduce", table, "--folder", folder)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    measured = {
        row["length"]: row["perplexity"] for row in rows(folder) if row["protocol"] == "paper"
    }
    for length, paper, form in ((32, 20.0, "20.0 ± 1.5 {:.1f}"), (64, 20.0, "20.00 {:.2f}")):
        ours = measured[length]
        assert f"good kerple_log {length} {form.format(ours)} 1 {ours - paper:+.4g}" in lines
    assert f"good kerple_log 128 out of memory {measured[128]:.2f} 1" in lines
    assert "good kerple_log 256 1.0 missing" in lines
    assert "3 of 5 cells have our numbers" in lines
    done = command("reproduce", "kerple-table5", "--folder", folder)
    assert "36 of 36 cells have no rows" in done.stdout  # those there are of another sweep
