"""Sweep files: what they become, what is wrong with a bad one, and how far their cells are."""

import json
import math

import pytest

from megatron.checkpoints.manifest import write_record
from megatron.config import load
from megatron.errors import UserError
from megatron.results.files import read_rows, write_lines
from megatron.sweeps.cells import collect, find_sweep, load_sweep
from megatron.sweeps.runner import Runner
from tests.results.rows import rows
from tests.support import ROOT, call
from tests.sweeps.conftest import SWEEP

SHIPPED = ROOT / "configs/sweeps"
SIZES = ("num_layers=2", "hidden_size=64", "num_attention_heads=4", "seq_length=32")
TINY = (
    "settings: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32,"
    " data_path: text, train_iters: 10}\n"
)


def sweep_of(tmp_path, text, **chosen):
    path = tmp_path / "mine.yml"
    path.write_text(text)
    return load_sweep(path, tmp_path / "runs", **chosen)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yml")), ids=lambda path: path.stem)
def test_every_cell_of_every_shipped_sweep_is_a_training_of_its_own(path):
    all_seeds = path.stem == "kerple_table3"
    cells = load_sweep(path, only=[] if all_seeds else ["seed=1235"]).cells
    assert cells[0].evaluations
    assert len({cell.config.hash for cell in cells}) == len(cells)
    assert len({cell.name for cell in cells}) == len(cells)
    if all_seeds:
        assert len(cells) == 3 * 6 * 5  # corpora, encodings, seeds
        config = cells[0].config
        assert (config.training.train_iters, config.optimizer.lr) == (50000, 6e-4)
        # The first seed is whole first.
        assert [cell.values["seed"] for cell in cells[:19]] == [1235] * 18 + [1236]
        assert "--start" in cells[0].evaluations[0].words
    if path.stem == "mep_small":  # alibi_scaling: 512 stands in MEP's files of rotary for it
        (yarn,) = (entry for entry in cells if entry.name == "openwebtext2-rotary_yarn-1235")
        meant = load([], ["pos_emb=rotary", "alibi_scaling=512", *SIZES]).position
        assert yarn.config.position == meant
    if path.stem == "kerple_one":  # its runs are table 3's
        table_3 = load_sweep("kerple_table3", only=["data=github", "seed=1235"]).cells
        assert [cell.config.hash for cell in cells] == [cell.config.hash for cell in table_3]


def test_a_list_in_a_rule_gives_several_values(tmp_path):
    grid = "{pos_emb: [alibi, t5, rotary], seed: [1, 2]}"
    text = f"{TINY}grid: {grid}\nexclude: [{{pos_emb: [t5, rotary], seed: 2}}]\n"
    evaluate = "evaluate: {{a: {{protocol: paper, only: {{pos_emb: [alibi, {}]}}}}}}"
    cells = sweep_of(tmp_path, text + evaluate.format("t5")).cells
    assert [(cell.name, len(cell.evaluations)) for cell in cells] == [
        *(("alibi-1", 1), ("t5-1", 1), ("rotary-1", 0), ("alibi-2", 1)),
    ]
    with pytest.raises(UserError, match=r"no cell has pos_emb: rotery"):
        sweep_of(tmp_path, text + evaluate.format("rotery"))


def test_axes_are_settings_files_or_settings_under_a_name(tmp_path):
    grid = "{pos_emb: [alibi, t5], size: {small: {}, wide: {hidden_size: 128}}, seed: [1, 2]}"
    rule = "exclude: [{pos_emb: t5, seed: 2}]"
    second = "b: {protocol: paper, windows: 8, only: {seed: 2}}"
    evaluate = f"evaluate: {{a: {{protocol: paper, eval_tokens: 64}}, {second}}}"
    text = f"{TINY}grid: {grid}\n{rule}\n{evaluate}"
    sweep = sweep_of(tmp_path, text)
    cells = {cell.name: cell for cell in sweep.cells}
    names = "alibi-small-1 t5-small-1 alibi-wide-1 t5-wide-1 alibi-small-2 alibi-wide-2"
    assert list(cells) == names.split()
    last = cells["alibi-wide-2"]
    config = last.config
    assert (config.model.hidden_size, config.training.seed) == (128, 2)
    assert config.position.pos_emb == "alibi"
    assert config["save"] == config["load"] == str(tmp_path / "runs/alibi-wide-2")
    (entry,) = cells["alibi-small-1"].evaluations
    assert entry.words == ("--protocol", "paper", "eval_tokens=64")
    assert [entry.words for entry in last.evaluations][1] == (
        *("--protocol", "paper", "--windows", "8"),
    )
    some = sweep_of(tmp_path, text, only=["size=wide", "seed=1"])
    assert [cell.name for cell in some.cells] == ["alibi-wide-1", "t5-wide-1"]


def test_emojis_and_paths_as_of_a_shell_are_plain_values(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yml").write_text("log_dir: ~/logs\n")
    text = TINY.replace("{", "{wandb_group: 😀, ", 1).replace(
        "data_path: text", "data_path: ~/text"
    )
    path = tmp_path / "mine.yml"
    path.write_text(f"base: [~/base.yml]\n{text}grid: {{seed: [1]}}\n")
    (cell,) = load_sweep(path, tmp_path / "𠮷田").cells
    assert cell.config["data_path"] == str(tmp_path / "text")
    assert cell.config["log_dir"] == str(tmp_path / "logs")
    assert cell.config["wandb_group"] == "😀"
    assert cell.config["save"] == str(tmp_path / "𠮷田/1")


def test_a_shipped_sweep_has_one_name_with_either_dash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("kerple-table3", "kerple_table3.yml", SHIPPED / "kerple-table3"):
        assert find_sweep(name).resolve() == SHIPPED / "kerple_table3.yml"
    (tmp_path / "cpu.yml").write_text("")
    assert find_sweep("cpu").resolve() == tmp_path / "cpu.yml"
    with pytest.raises(UserError, match=r"kerple_tabel3: no such file; did you mean .*table3"):
        load_sweep("kerple-tabel3")


# --- How far a cell is ---


@pytest.fixture
def path(tmp_path, corpus):
    path = tmp_path / "tiny.yml"
    path.write_text(SWEEP.format(corpus=corpus, steps=10))
    return path


@pytest.fixture
def cell(path, tmp_path):
    return load_sweep(path, tmp_path / "runs").cells[0]


def checkpoint(cell, step, config_hash=None):
    """As much of a checkpoint as says how far a cell is."""
    folder = cell.folder / f"global_step{step}"
    folder.mkdir(parents=True)
    record = {"step": step, "config_hash": config_hash or cell.config.hash, "vocab": 64}
    write_record(folder, record | {"files": {}})


def evaluated(cell, evaluation, config_hash=None):
    path = cell.file(evaluation)
    path.parent.mkdir(exist_ok=True)
    row = {"pos_emb": "kerple_log", "length": 32, "windows": 1, "tokens": 32, "loss": 1.0}
    row |= {"perplexity": math.e, "step": cell.steps}
    row["config_hash"] = config_hash or cell.config.hash
    path.write_text(json.dumps(row) + "\n")


def test_a_cell_is_worked_on_only_while_somebody_holds_its_lock(path, cell, tmp_path):
    words = path, "--folder", tmp_path / "runs"

    def shown():
        _, first, _ = call("tools/sweep.py", "status", *words).stdout.splitlines()
        return first.removeprefix("good-1    ")

    assert shown() == "waiting"
    assert not cell.folder.exists(), "looking makes no folder"
    cell.folder.mkdir(parents=True)
    with cell.lock:
        assert shown() == "training at step 0 of 10"
        done = call("tools/sweep.py", "run", *words, "--only", "data=good")
        assert done.returncode == 1
        assert "good-1: another process is working on it" in done.stdout
        missing = ["1 of 1 cells are missing:", "  good-1: training at step 0 of 10"]
        assert done.stderr.splitlines() == missing
    checkpoint(cell, 5)
    assert shown() == "stopped at step 5 of 10"
    failure = cell.folder / "failure.txt"
    failure.write_bytes(b"no memory\x1b\n")
    assert shown() == r"failed at step 5 of 10: no memory\x1b"
    failure.unlink()
    checkpoint(cell, 10)
    evaluated(cell, cell.evaluations[0])
    assert shown() == "trained, 1 of 2 evaluations are missing"
    with cell.lock:
        assert shown() == "evaluating, 1 of 2 evaluations are missing"
    evaluated(cell, cell.evaluations[1])
    status = call("tools/sweep.py", "status", *words)
    assert (status.returncode, status.stderr) == (0, "")
    title = f"tiny: 2 cells, 1 done, 1 waiting; runs in {tmp_path / 'runs'}"
    assert status.stdout.splitlines() == [title, "good-1    done", "absent-1  waiting"]
    (cell.folder / "global_step10/checkpoint.json").write_text("{")
    assert shown().startswith(f"damaged: {cell.folder}/global_step10/checkpoint.json: not readable")


def test_a_training_that_was_killed_before_its_last_rows_is_started_again(cell, monkeypatch):
    scripts = []
    monkeypatch.setattr(Runner, "_ended_well", lambda _, cell, words, place: scripts.append(words))
    checkpoint(cell, 10)
    optimizer = cell.folder / "global_step10/optimizer.safetensors"
    optimizer.touch()
    for script in ("train.py", "evaluate.py"):
        Runner(lambda text: None).work(cell, {})
        assert scripts.pop()[0] == script
        optimizer.unlink(missing_ok=True)


def test_rows_within_trainings_are_collected_with_their_cells_in_a_file_of_their_own(tmp_path):
    measures = "{extrapolation_interval: 2, extrapolation: {protocol: tail, tail: 16}, "
    settings = TINY.replace("{", measures, 1)
    text = f"{settings}grid: {{pos_emb: [alibi, t5], seed: [1]}}\n"
    sweep = sweep_of(tmp_path, text)
    for cell in sweep.cells:
        for step in (2, 10):
            facts = {"protocol": "tail", "config_hash": cell.config.hash, "step": step}
            measured = rows(cell.config.position.pos_emb, {512: 9.0}, **facts)
            measured += rows("rotary", {512: 9.0}, **facts | {"config_hash": "0123456789ab"})
            name = f"text-valid-global_step{step}-tail.jsonl"
            write_lines(cell.folder / "evaluation" / name, measured)
    assert collect(sweep) == []
    collected = read_rows([sweep.folder / "training.jsonl"])
    assert [row["cell"] for row in collected[::2]] == [cell.values for cell in sweep.cells]
    measured = [(row["pos_emb"], row["step"]) for row in collected]
    assert measured == [("alibi", 2), ("alibi", 10), ("t5", 2), ("t5", 10)]
    with pytest.raises(UserError, match="extrapolation: --protocol: invalid choice: 'tails'"):
        sweep_of(tmp_path, text.replace("protocol: tail,", "protocol: tails,"))
