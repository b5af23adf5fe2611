"""tools/sweep.py as it is used: killed again and again, with a run that fails, through Slurm."""

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.data.tokens import TokenFile
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.run import Runner, held
from megatron.sweeps.state import collect, state_of
from tests.support import ROOT, run

KILLS = {"metrics.jsonl": 8, "evaluation/*.jsonl": 3}  # how often, and after which file was written
SWEEP = """
settings: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32, tokenizer_type: CharLevelTokenizer,
  train_iters: {steps}, save_interval: 5, keep_last_n_checkpoints: 1, log_interval: 5, eval_interval: 0,
  eval_lengths: [32, 64, 128], eval_tokens: 4096, pos_emb: kerple_log}}
grid:
  data: {{good: {{data_path: {corpus}}}, absent: {{data_path: {corpus}_of_nobody}}}}
  seed: [1]
evaluate: {{equal: {{protocol: equal_tokens}}, paper: {{protocol: paper, windows: 8}}}}
"""
TABLE = """
paper: a paper of nobody
provenance: written for this test
sweep: tiny.yml
quantity: perplexity
protocol: paper
windows: 8
part: valid
seeds: 4
cells: {good: {kerple_log: {32: [20.0, 1.5], 64: [20.00], 128: out of memory, 256: [1.0]}, alibi: {32: [3.0]}}}
"""


@pytest.fixture(scope="module")
def file(corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "tiny.yml"
    path.write_text(SWEEP.format(corpus=corpus, steps=400))
    return path


@pytest.fixture(scope="module")
def whole(file):
    """The folder of the sweep that nobody disturbs, and what was printed."""
    folder = file.parent / "whole"
    done = run("tools/sweep.py", "run", file, "--folder", folder)
    assert done.returncode == 1, done.stderr  # one cell cannot run
    return folder, done


def rows(folder: Path) -> list[dict]:
    """results.jsonl without what depends on the clock and the place."""
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    clock = ("seconds", "tokens_per_second", "seconds_per_step", "checkpoint", "commit")
    return [{key: value for key, value in row.items() if key not in clock} for row in found]


def losses(folder: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (folder / "good-1/metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def test_a_run_that_fails_is_shown_with_its_reason_and_the_others_go_on(file, whole):
    folder, done = whole
    assert "good-1: done" in done.stdout
    assert len(rows(folder)) == 6  # two protocols, three lengths
    assert rows(folder)[0]["cell"] == {"data": "good", "seed": 1}
    status = run("tools/sweep.py", "status", file, "--folder", folder)
    assert status.returncode == 1
    assert "good-1    done        step 400/400" in status.stdout
    assert "_of_nobody" in status.stdout.splitlines()[-1]
    assert "failed: absent-1" in done.stderr


def test_a_sweep_killed_at_random_moments_has_the_results_of_an_undisturbed_one(file, whole):
    folder = file.parent / "killed"
    sweep, kills = load_sweep(file, folder), 0
    for pattern, count in KILLS.items():
        kills += sum(killed(sweep, folder / "good-1", pattern) for _ in range(count))
        assert state_of(sweep.cells[0]).kind != "done" or "eval" in pattern, (
            "too fast for this test"
        )
    assert kills >= 10
    Runner([None], lambda text: None).run(sweep)
    collect(sweep)
    assert rows(folder) == rows(whole[0])
    assert losses(folder) == losses(whole[0])


def killed(sweep, folder: Path, pattern: str) -> bool:
    """Run a sweep until a while after it has written such a file, then kill it and all it has started."""
    before = written(folder, pattern)
    process = multiprocessing.get_context("fork").Process(target=alone, args=(sweep,))
    process.start()
    while process.is_alive() and written(folder, pattern) == before:
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.1))
    alive = process.is_alive()
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    while not free(folder):  # until what was killed is gone
        time.sleep(0.005)
    return alive


@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGINT, os.kill),
        (signal.SIGINT, os.killpg),
        (signal.SIGHUP, os.killpg),
        (signal.SIGTERM, os.kill),
    ],
)
def test_a_signal_to_a_sweep_or_its_terminal_ends_its_trainings_with_a_checkpoint(
    file, tmp_path, number, send
):
    here = tmp_path / "long.yml"
    here.write_text(
        file.read_text()
        .replace("train_iters: 400", "train_iters: 100000")
        .replace("save_interval: 5", "save_interval: 0")
    )
    words = ["tools/sweep.py", "run", here, "--folder", tmp_path / "runs", "--only", "data=good"]
    folder = tmp_path / "runs/good-1"
    before = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # or, where these tests run under nohup, it is ignored
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=said, start_new_session=True
        )
        signal.signal(signal.SIGHUP, before)
        try:
            while process.poll() is None and not written(folder, "metrics.jsonl"):
                time.sleep(0.05)
            send(process.pid, number)
            assert process.wait(timeout=60) == 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert free(folder), "a training outlived its sweep"
    (state,) = [state_of(cell) for cell in load_sweep(here, tmp_path / "runs", ["data=good"]).cells]
    assert (state.kind, 0 < state.step < 100000) == ("training", True)


def free(folder: Path) -> bool:
    with held(folder) as lock:
        return lock is not None


def alone(sweep) -> None:
    os.setsid()
    Runner([None], lambda text: None).run(sweep)


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
    assert (state.kind, state.step) == ("foreign", 400)
    assert cell.config.hash in state.note
    said: list[str] = []
    sweep = load_sweep(file, tmp_path / "busy", only=["data=good"])
    with held(sweep.cells[0].folder):
        Runner([None], said.append).run(sweep)
    assert said == ["good-1: another process is at work on it"]


def test_slurm_gets_an_array_of_what_is_missing(file, whole, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/sent.sh\n')
    sbatch.chmod(0o755)
    words = [
        "run",
        file,
        "--folder",
        tmp_path / "runs",
        "--launcher",
        "slurm",
        "--sbatch=--partition=long",
        "--sbatch=--mem=1G",
    ]
    sent = run("tools/sweep.py", *words, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert sent.returncode == 0, sent.stderr
    script = (tmp_path / "sent.sh").read_text()
    assert "#SBATCH --array=0-1\n" in script
    assert "#SBATCH --partition=long\n#SBATCH --mem=1G\n" in script
    assert (
        "#SBATCH --signal=B:TERM@120\n" in script
    )  # without B: the script, which has no steps, is not told
    script = script.replace(str(tmp_path / "runs"), str(whole[0]))
    (tmp_path / "here.sh").write_text(script)
    done = run(
        "-c",
        f"import os; os.execvp('bash', ['bash', '{tmp_path}/here.sh'])",
        env={"SLURM_ARRAY_TASK_ID": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "1 cells, 1 done" in done.stdout


def test_a_number_of_jobs_is_at_least_one(file):
    for jobs in ("0", "-1"):
        wrong = run("tools/sweep.py", "run", file, f"--jobs={jobs}", "--dry-run")
        assert wrong.returncode == 2
        assert f"--jobs: {jobs} is no number of runs: give 1 or more" in wrong.stderr


def test_runs_that_share_the_cpu_take_no_less_time_together(file, tmp_path, monkeypatch):
    tool = importlib.import_module("megatron.commands.sweep")
    sweep = load_sweep(file, tmp_path)
    assert "hours on 1 x" in tool.plan(sweep, [state_of(cell) for cell in sweep.cells], 2)


def test_places_are_the_devices_that_this_process_may_use(monkeypatch):
    sweep = importlib.import_module("megatron.commands.sweep")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert sweep.places(None) == ["2", "3"]
    assert sweep.places(3) == ["2", "3", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweep.places(None) == ["0", "1"]


def test_what_was_known_of_a_corpus_stays_known_where_the_data_are_not(
    file, whole, corpus, tmp_path
):
    folder, text = tmp_path / "runs", tmp_path / "text"
    for end in (".idx", ".bin", ".json"):
        if Path(f"{corpus}{end}").exists():
            shutil.copy(f"{corpus}{end}", f"{text}{end}")
    here = tmp_path / "tiny.yml"
    here.write_text(SWEEP.format(corpus=text, steps=5))
    assert (
        run("tools/sweep.py", "run", here, "--folder", folder, "--only", "data=good").returncode
        == 0
    )
    before = rows(folder)
    assert before[0]["corpus_tokens"] > 0
    Path(f"{text}.idx").unlink()
    (folder / "good-1/metrics.jsonl").unlink()
    assert run("tools/sweep.py", "collect", here, "--folder", folder).returncode == 0
    assert rows(folder) == before


def test_a_folder_of_other_runs_and_rows_of_no_cell_are_said(whole):
    shown = run("tools/reproduce.py", "kerple-table5", "--folder", whole[0])
    assert (
        f"{whole[0]}: holds other runs than kerple_table5.yml's: absent-1, good-1" in shown.stdout
    )
    shown = run("tools/reproduce.py", "kerple-table5", "--results", whole[0] / "results.jsonl")
    assert "6 of 6 rows match no cell" in shown.stdout


def test_a_table_of_ones_own_stands_beside_what_its_sweep_measured(file, whole):
    table = file.with_name("mine.table.yml")
    table.write_text(TABLE)
    shown = run("tools/reproduce.py", table, "--folder", whole[0])
    assert shown.returncode == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    measured = {
        row["length"]: row["perplexity"] for row in rows(whole[0]) if row["protocol"] == "paper"
    }
    for length, paper, form in ((32, 20.0, "20.0 ± 1.5 {:.1f}"), (64, 20.0, "20.00 {:.2f}")):
        ours = measured[length]
        assert f"good kerple_log {length} {form.format(ours)} 1 {ours - paper:+.4g}" in lines
    assert f"good kerple_log 128 out of memory {measured[128]:.2f} 1" in lines
    assert "good kerple_log 256 1.0 missing" in lines
    assert "good alibi 32 3.0 missing" in lines
    assert "3 of 5 cells are there; none is filled in" in lines


def test_a_sweep_of_one_text_needs_no_axis_for_it(corpus, tmp_path):
    text = SWEEP.format(corpus=corpus, steps=5).replace(
        "[32, 64, 128]", f"[32, 64, 128], data_path: {corpus}"
    )
    text = "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("  data:")
    )
    (tmp_path / "tiny.yml").write_text(text)
    tokens = TokenFile.open(corpus)
    (tmp_path / "mine.yml").write_text(
        TABLE.replace("good", tokens.meta.get("corpus") or tokens.prefix.name)
    )
    shown = run("tools/reproduce.py", tmp_path / "mine.yml", "--folder", tmp_path / "runs", "--run")
    assert shown.returncode == 0, shown.stderr
    assert "3 of 5 cells are there; none is filled in" in shown.stdout


def test_what_a_table_needs_is_run_first_and_its_seeds_give_standard_errors(corpus, tmp_path):
    absent = f"absent: {{data_path: {corpus}_of_nobody}}"
    text = (
        SWEEP.format(corpus=corpus, steps=5)
        .replace(absent, "")
        .replace("seed: [1]", "seed: [1, 2]")
    )
    (tmp_path / "tiny.yml").write_text(text)
    (tmp_path / "mine.yml").write_text(TABLE)
    shown = run("tools/reproduce.py", tmp_path / "mine.yml", "--folder", tmp_path / "runs", "--run")
    assert shown.returncode == 0, shown.stderr
    ours = [
        row["perplexity"]
        for row in rows(tmp_path / "runs")
        if (row["protocol"], row["length"]) == ("paper", 32)
    ]
    difference = statistics.mean(ours) - 20
    errors = difference / math.sqrt(statistics.variance(ours) / 2 + 1.5**2 / 4)
    spread = f"{statistics.mean(ours):.1f} ± {statistics.stdev(ours):.1f} 2 {difference:+.4g} {errors:+.1f}"
    assert f"good kerple_log 32 20.0 ± 1.5 {spread}" in " ".join(shown.stdout.split())


def test_results_of_another_sweep_are_neither_replaced_nor_emptied(file, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text("rows\n")
    for words in (("tools/sweep.py", "collect", file), ("tools/reproduce.py", "kerple-table5")):
        done = run(*words, "--folder", tmp_path)
        assert results.read_text() == "rows\n"
    assert run("tools/sweep.py", "collect", file, "--folder", tmp_path).returncode == 1
    assert done.stdout.count("missing") == 36
