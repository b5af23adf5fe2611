"""How far a cell is, what is shown of it, and who works on it."""

import json
import math

import pytest

from megatron.sweeps.lock import at_work, held
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.state import described, state_of, unfinished
from tests.sweeps.conftest import SWEEP, command


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tiny.yml"
    path.write_text(SWEEP.format(corpus="text", steps=10))
    return path


@pytest.fixture
def cell(path, tmp_path):
    return load_sweep(path, tmp_path / "runs").cells[0]


def checkpoint(cell, step):
    """As much of a checkpoint as says how far a cell is."""
    folder = cell.folder / f"global_step{step}"
    folder.mkdir(parents=True)
    record = {"step": step, "config_hash": cell.config.hash, "vocab": 64}
    (folder / "checkpoint.json").write_text(json.dumps(record))


def evaluated(cell, evaluation):
    path = cell.file(evaluation)
    path.parent.mkdir(exist_ok=True)
    row = {"pos_emb": "kerple_log", "length": 32, "windows": 1, "tokens": 32, "loss": 1.0}
    row |= {"perplexity": math.e, "step": cell.steps, "config_hash": cell.config.hash}
    path.write_text(json.dumps(row) + "\n")


def shown(cell):
    state = state_of(cell)
    return state.kind, described(cell, state)


def test_a_cell_is_in_training_only_while_somebody_works_on_it(cell):
    assert shown(cell) == ("waiting", "waiting")
    with held(cell.folder):
        assert shown(cell) == ("training", "training, checkpoint at step 0 of 10")
    checkpoint(cell, 5)
    assert shown(cell) == ("stopped", "stopped at step 5 of 10")
    with held(cell.folder):
        assert shown(cell) == ("training", "training, checkpoint at step 5 of 10")
    (cell.folder / "failure.txt").write_text("no memory\n")
    assert shown(cell) == ("failed", "failed at step 5 of 10: no memory")


def test_a_trained_cell_is_evaluated_only_while_somebody_works_on_it(cell):
    checkpoint(cell, 10)
    evaluated(cell, cell.evaluations[0])
    assert shown(cell) == ("trained", "trained, 1 of 2 evaluations are missing")
    with held(cell.folder):
        assert shown(cell) == ("evaluating", "evaluating, 1 of 2 evaluations are missing")
    evaluated(cell, cell.evaluations[1])
    assert shown(cell) == ("done", "done")


def test_looking_at_a_cell_takes_no_lock_and_makes_no_folder(cell):
    assert not at_work(cell.folder)
    assert not cell.folder.exists()
    with held(cell.folder) as lock:
        assert lock is not None
        assert at_work(cell.folder)
        with held(cell.folder) as second:
            assert second is None
    assert not at_work(cell.folder)


def test_status_counts_and_shows_every_cell(path, cell, tmp_path):
    checkpoint(cell, 5)
    status = command("sweep", "status", path, "--folder", tmp_path / "runs")
    assert status.returncode == 0
    assert status.stdout.splitlines() == [
        f"tiny: 2 cells, 1 stopped, 1 waiting; runs in {tmp_path / 'runs'}",
        "good-1    stopped at step 5 of 10",
        "absent-1  waiting",
    ]


def test_a_run_that_leaves_cells_to_another_process_says_so(path, cell, tmp_path):
    words = ["run", path, "--folder", tmp_path / "runs", "--only", "data=good"]
    with held(cell.folder):
        done = command("sweep", *words)
    assert done.returncode == 1
    assert "good-1: another process is at work on it" in done.stdout
    assert done.stderr.splitlines() == [
        "1 of 1 cells are missing:",
        "  good-1: training, checkpoint at step 0 of 10",
    ]


def test_collect_says_how_many_cells_are_missing(path, cell, tmp_path):
    checkpoint(cell, 10)
    for evaluation in cell.evaluations:
        evaluated(cell, evaluation)
    sweep = load_sweep(path, tmp_path / "runs")
    assert [one.name for one, _ in unfinished(sweep)] == ["absent-1"]
    done = command("sweep", "collect", path, "--folder", tmp_path / "runs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"2 rows in {tmp_path / 'runs/results.jsonl'}",
        "1 of 2 cells are missing: see status",
    ]


def test_a_damaged_checkpoint_of_a_cell_is_named(cell):
    checkpoint(cell, 5)
    (cell.folder / "global_step5" / "checkpoint.json").write_text("{")
    kind, line = shown(cell)
    assert kind == "damaged"
    assert line.startswith(f"damaged: {cell.folder}/global_step5/checkpoint.json: not readable")
