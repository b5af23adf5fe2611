"""Rows of evaluate.py's protocols within a training: equal to later ones, and of no influence."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from megatron.checkpoints.saved import latest_step
from megatron.errors import UserError
from megatron.evaluation import evaluate_checkpoint
from megatron.evaluation.evaluate_checkpoint import evaluate
from megatron.evaluation.options import Options
from megatron.results.files import read_rows
from megatron.results.row import Row
from megatron.training.loop import train
from tests.training.conftest import check_same, interrupted, settings

MEASURES = [
    *("extrapolation_interval=2", "eval_lengths=[32, 128]", "eval_tokens=512", "split=8,1,1"),
    "extrapolation={protocol: [equal_tokens, tail], tail: 16}",
]
GROWS = [
    *("pos_emb=rotary", "hidden_dropout=0.1", "save_interval=1", "eval_interval=3"),
    "seq_length_schedule=[{until: 3, seq_length: 16, window: 8, pos_emb_args: {base: 500}},"
    " {pos_emb_args: {scaling: yarn, factor: 2}}]",
]
OF_A_CLOCK = {"seconds", "tokens_per_second"}


def rows_within(folder: Path) -> list[Row]:
    files = sorted((folder / "evaluation").glob("*.jsonl"))
    return [row for file in files for row in read_rows([file])]


def rows_after(folder: Path, step: int, output: Path) -> list[Row]:
    """Those of evaluate.py with a checkpoint."""
    options = Options(
        checkpoint=str(folder),
        step=step,
        protocol=["equal_tokens", "tail"],
        protocol_options={"tail": 16},
        output=output,
    )
    [rows] = evaluate(None, options).rows.values()
    return rows


def without_clock(rows: list[Row]) -> list[dict]:
    facts = [{key: row[key] for key in row.keys() - OF_A_CLOCK} for row in rows]
    return sorted(facts, key=lambda row: (row["step"], row["protocol"], row["length"]))


OTHERS = [pytest.param(["precision=fp32"], marks=pytest.mark.campaign)]


@pytest.mark.parametrize("how", [["precision=bf16", "zero_optimization.stage=3"], *OTHERS])
def test_rows_are_those_of_a_later_evaluation_and_change_no_loss(grid, corpus, tmp_path, how):
    plain, measured = tmp_path / "plain", tmp_path / "measured"
    words = [*GROWS, *how, "split=8,1,1", "train_iters=5"]
    train(settings(corpus, plain, *words), grid)
    train(settings(corpus, measured, *words, *MEASURES), grid)
    check_same(plain, measured)
    check_same(plain, measured, "valid")
    within = without_clock(rows_within(measured))
    later = []
    for step in (2, 4, 5):  # 5 is the last one
        later += rows_after(measured, step, tmp_path / f"{step}.jsonl")
    assert within == without_clock(later)
    assert len(within) == 3 * 2 * 2
    first, last = within[0], within[-1]
    assert (first["window"], first["pos_emb_args"]) == (8, {"base": 500})
    assert last["pos_emb_args"] == {"scaling": "yarn", "factor": 2}
    assert "window" not in last
    assert (first["stage_length"], last["stage_length"]) == (16, last["train_length"])
    assert first["stage_ends"] == last["stage_ends"] == [3]
    assert len({row["loss"] for row in within if row["length"] == 32}) == 6


def test_a_run_that_is_killed_or_stopped_completes_its_rows_once(
    grid, corpus, tmp_path, monkeypatch
):
    words = [*GROWS, *MEASURES, "train_iters=4"]
    straight = tmp_path / "straight"
    train(settings(corpus, straight, *words), grid)
    expected = rows_within(straight)
    broken = interrupted(straight, 2, tmp_path / "broken")
    for file in (broken / "evaluation").glob("*global_step2-tail*"):
        file.unlink()
    for file in (broken / "evaluation").glob("*global_step4*"):
        file.unlink()
    counted = []
    measured = evaluate_checkpoint.measured

    def counting(model, windows, **how):
        counted.append(windows.length)
        if len(counted) == 7:
            os.kill(os.getpid(), signal.SIGUSR1)  # as a scheduler that wants the machine
        return measured(model, windows, **how)

    monkeypatch.setattr(evaluate_checkpoint, "measured", counting)
    shutil.move(straight, tmp_path / "away")
    shutil.move(broken, straight)  # rows name their checkpoint
    train(settings(corpus, straight, *words), grid)
    assert without_clock(rows_within(straight)) == without_clock(expected)
    assert len(counted) == 2 + 4  # what was there of step 2 is kept

    stopped = tmp_path / "stopped"
    with pytest.raises(SystemExit) as ended:
        train(settings(corpus, stopped, *words, "save_interval=0"), grid)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert [row["length"] for row in rows_within(stopped)] == [32]
    assert (stopped / "latest").read_text() == "global_step2"  # saved although it was not due


def signalled(measure):
    """A measurement during which a scheduler wants the machine."""

    def function(*words, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(*words, **options)

    return function


def test_numbers_of_the_last_step_that_a_signal_or_a_kill_leaves_out_are_completed_once(
    grid, corpus, tmp_path, monkeypatch
):
    config = settings(corpus, tmp_path, *MEASURES, "eval_interval=9", "train_iters=2")
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_checkpoint, "measured", signalled(evaluate_checkpoint.measured))
        with pytest.raises(SystemExit) as ended:
            train(config, grid)
    assert ended.value.code == 128 + signal.SIGTERM
    assert latest_step(tmp_path) == 2
    for _ in range(2):
        assert train(config, grid) == tmp_path / "global_step2"
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 + 1
        assert len(rows_within(tmp_path)) == 2 * 2
        next((tmp_path / "evaluation").glob("*-tail*")).unlink()  # as a kill would have left it


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("extrapolation={protocol: tails}", "extrapolation: --protocol: invalid choice: 'tails'"),
        ("extrapolation={step: 4}", "extrapolation: step: the training sets it - remove it"),
        ("extrapolation={protocol: tail}", "extrapolation: --tail 256: must be 1 to 32"),
        ("eval_tokens=64", "eval_lengths: a window of length 128 needs 128 tokens to predict"),
        ("extrapolation={tail: 16}", "extrapolation: --tail: only works with --protocol tail"),
    ],
)
def test_rows_that_cannot_be_given_are_refused_before_the_first_step(
    grid, corpus, tmp_path, word, message
):
    with pytest.raises(UserError) as fault:
        train(settings(corpus, tmp_path, *MEASURES, word), grid)
    assert message in str(fault.value)
    assert not list(tmp_path.glob("global_step*"))
