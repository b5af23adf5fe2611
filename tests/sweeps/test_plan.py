"""Sweep files: the shipped ones, what they become, what is wrong with a bad one."""

import argparse

import pytest

from evaluate import add_options
from megatron.errors import UserError
from megatron.sweeps.form import OPTIONS
from megatron.sweeps.plan import described_faults, find_sweep, load_sweep
from tests.support import ROOT

SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.yml"))
TINY = (
    "num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, data_path: text, "
    "train_iters: 10"
)


def sweep_of(tmp_path, text, **chosen):
    path = tmp_path / "mine.yml"
    path.write_text(text)
    return load_sweep(path, tmp_path / "runs", **chosen)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_cell_of_every_shipped_sweep_is_a_training_of_its_own(path):
    cells = load_sweep(path).cells
    assert cells[0].evaluations
    assert len({cell.config.hash for cell in cells}) == len(cells)
    assert len({cell.name for cell in cells}) == len(cells)


def test_the_sweep_of_table_3_is_its_grid_by_its_recipe():
    cells = load_sweep(ROOT / "configs/sweeps/kerple_table3.yml").cells
    assert len(cells) == 3 * 6 * 5  # corpora, encodings, seeds
    config = cells[0].config
    assert config.training.train_iters == 50000
    assert config.optimizer.lr == 6e-4
    assert config.model.seq_length == 512
    # The first seed is whole first.
    assert [cell.values["seed"] for cell in cells[:19]] == [1235] * 18 + [1236]
    assert "--start" in cells[0].evaluations[0].words


def test_axes_are_settings_files_or_settings_under_a_name(tmp_path):
    grid = "{pos_emb: [alibi, t5], size: {small: {}, wide: {hidden_size: 128}}, seed: [1, 2]}"
    rules = "exclude: [{pos_emb: t5, seed: 2}]\nextra: [{pos_emb: rotary, size: wide, seed: 7}]"
    evaluate = "evaluate: {a: {protocol: paper, eval_tokens: 64}}"
    text = f"settings: {{{TINY}}}\ngrid: {grid}\n{rules}\n{evaluate}"
    cells = {cell.name: cell for cell in sweep_of(tmp_path, text).cells}
    assert list(cells) == [
        "alibi-small-1",
        "t5-small-1",
        "alibi-wide-1",
        "t5-wide-1",
        "alibi-small-2",
        "alibi-wide-2",
        "rotary-wide-7",
    ]
    last = cells["rotary-wide-7"].config
    assert (last.model.hidden_size, last.training.seed, last.position.pos_emb) == (128, 7, "rotary")
    assert last["save"] == last["load"] == str(tmp_path / "runs/rotary-wide-7")
    assert cells["alibi-small-1"].evaluations[0].words == ("--protocol", "paper", "eval_tokens=64")
    some = sweep_of(tmp_path, text, only=["size=wide", "seed=1,7"])
    assert [cell.name for cell in some.cells] == ["alibi-wide-1", "t5-wide-1", "rotary-wide-7"]


def test_an_evaluation_can_be_for_some_cells_alone(tmp_path):
    grid = "grid: {pos_emb: [alibi, t5], seed: [1, 2]}"
    evaluate = "evaluate: {all: {}, one: {protocol: tail, only: {pos_emb: t5, seed: 2}}}"
    text = f"settings: {{{TINY}}}\n{grid}\n{evaluate}"
    cells = {cell.name: cell.evaluations for cell in sweep_of(tmp_path, text).cells}
    assert {name: len(several) for name, several in cells.items()} == {
        "alibi-1": 1,
        "t5-1": 1,
        "alibi-2": 1,
        "t5-2": 2,
    }
    assert cells["t5-2"][1].words == ("--protocol", "tail")
    for only in ("{seed: 3}", "{size: 1}", "{pos_emb: alibi, seed: 1, size: 1}"):
        bad = text.replace("{pos_emb: t5, seed: 2}", only)
        with pytest.raises(
            UserError, match=r"evaluate: one: only: no cell has \{.*axes pos_emb, se"
        ):
            sweep_of(tmp_path, bad)
    with pytest.raises(
        UserError, match=r"evaluate: one: only: name the cells that it is for, such"
    ):
        sweep_of(tmp_path, text.replace("{pos_emb: t5, seed: 2}", "[1]"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {seed: 1}", "grid: seed has no values"),
        ("axes: {}", "axes: no such part"),
        ("base: x", "base: give a list"),
        ("keep_optimizer_states: yes please", "keep_optimizer_states: give true or false"),
        (f"settings: {{{TINY}}}\ngrid: {{pos_emb: [rotery]}}", "did you mean rotary"),
        (
            f"settings: {{{TINY}}}\ngrid: {{seed: [1]}}\nexclude: [{{sead: 1}}]",
            "is no point of the grid",
        ),
        ("grid: {seed: [1]}\nbase: [configs/126M.yml]", "did you mean"),
    ],
)
def test_a_bad_sweep_is_one_message(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        sweep_of(tmp_path, text)


def test_only_names_what_there_is(tmp_path):
    with pytest.raises(UserError, match="seed = 1, 2"):
        sweep_of(tmp_path, f"settings: {{{TINY}}}\ngrid: {{seed: [1, 2]}}", only=["seed=3"])
    with pytest.raises(UserError, match="no axis sed, it has seed - did you mean seed"):
        sweep_of(tmp_path, f"settings: {{{TINY}}}\ngrid: {{seed: [1, 2]}}", only=["sed=1"])


@pytest.mark.parametrize(
    "name",
    [
        "kerple-table3",
        "kerple_table3",
        "kerple_table3.yml",
        "configs/sweeps/kerple-table3",
        ROOT / "configs/sweeps/kerple-table3.yml",
    ],
)
def test_a_shipped_sweep_has_one_name_with_either_dash(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT if "/" in str(name) else tmp_path)
    assert find_sweep(name).resolve() == ROOT / "configs/sweeps/kerple_table3.yml"


def test_a_file_in_the_current_folder_comes_before_a_shipped_sweep(tmp_path, monkeypatch):
    (tmp_path / "cpu.yml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_sweep("cpu").resolve() == tmp_path / "cpu.yml"


def test_an_unknown_sweep_says_where_it_looked_and_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as fault:
        load_sweep("xyz")
    shipped = ROOT / "configs/sweeps"
    assert f"sweep: xyz: no such file (looked in {tmp_path} and {shipped})" in str(fault.value)
    assert "give a file, or one of cpu, dape, kerple_table10, kerple_table3," in str(fault.value)
    with pytest.raises(UserError, match=r"did you mean kerple_table3\?"):
        load_sweep("kerple-tabel3")
    with pytest.raises(UserError, match=r"did you mean .*kerple_table3\.yml"):
        load_sweep(shipped / "kerple_tabel3.yml")


def test_a_sweep_may_keep_optimizer_states(tmp_path):
    text = f"settings: {{{TINY}}}\ngrid: {{seed: [1]}}"
    assert not sweep_of(tmp_path, text).keep_states
    assert sweep_of(tmp_path, text + "\nkeep_optimizer_states: true").keep_states


def test_an_input_is_looked_for_beside_the_sweep_file_too(tmp_path, monkeypatch, caplog):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "text.idx").touch()
    text = f"settings: {{{TINY}}}\ngrid: {{seed: [1, 2]}}"
    for cell in sweep_of(tmp_path, text).cells:
        assert cell.config.data.data_path == str(tmp_path / "text")
    assert caplog.messages == []
    (here / "text.idx").touch()
    for cell in sweep_of(tmp_path, text).cells:
        assert cell.config.data.data_path == "text"
    (note,) = caplog.messages
    assert f"data_path: text of the current folder is used, and not {tmp_path}/text" in note


def test_a_cell_with_a_bad_configuration_is_kept_apart_from_those_that_can_run(tmp_path):
    text = f"settings: {{{TINY}}}\ngrid: {{pos_emb: [alibi, rotery], seed: [1, 2]}}"
    sweep = sweep_of(tmp_path, text)
    assert [cell.name for cell in sweep.cells] == ["alibi-1", "alibi-2"]
    assert list(sweep.broken) == ["rotery-1", "rotery-2"]
    (line,) = described_faults(sweep.broken)
    assert line.startswith("rotery-1, rotery-2: bad configuration")
    assert "did you mean rotary?" in line


def test_every_option_of_a_sweep_is_one_of_evaluate():
    parser = argparse.ArgumentParser()
    add_options(parser)
    for option in OPTIONS:
        assert f"--{option.replace('_', '-')}" in parser.format_help()
