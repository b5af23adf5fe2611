"""Sweep files: the shipped ones, what they become, what is wrong with a bad one, what the whole costs."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import load
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.protocols import PROTOCOLS, Request
from megatron.model import from_config
from megatron.sweeps.cost import Cost, cost, forward_flops, parameters, window_counts
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.state import State
from tests.support import ROOT

SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.yml"))
TINY = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, data_path: text, train_iters: 10"


def sweep_of(tmp_path, text, **chosen):
    path = tmp_path / "mine.yml"
    path.write_text(text)
    return load_sweep(path, tmp_path / "runs", **chosen)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_cell_of_every_shipped_sweep_is_a_training_of_its_own(path):
    cells = load_sweep(path).cells
    assert cells[0].evaluations
    assert (
        len({cell.config.hash for cell in cells})
        == len({cell.name for cell in cells})
        == len(cells)
    )


def test_the_sweep_of_table_3_is_its_grid_by_its_recipe():
    cells = load_sweep(ROOT / "configs/sweeps/kerple_table3.yml").cells
    assert len(cells) == 3 * 6 * 5  # corpora, encodings, seeds
    config = cells[0].config
    assert (config.training.train_iters, config.optimizer.lr, config.model.seq_length) == (
        50000,
        6e-4,
        512,
    )
    assert [cell.values["seed"] for cell in cells[:19]] == [1235] * 18 + [
        1236
    ]  # the first seed is whole first
    assert "--start" in cells[0].evaluations[0].words


def test_axes_are_settings_files_or_settings_under_a_name(tmp_path):
    grid = "{pos_emb: [alibi, t5], size: {small: {}, wide: {hidden_size: 128}}, seed: [1, 2]}"
    rules = "exclude: [{pos_emb: t5, seed: 2}]\nextra: [{pos_emb: rotary, size: wide, seed: 7}]"
    text = f"settings: {{{TINY}}}\ngrid: {grid}\n{rules}\nevaluate: {{a: {{protocol: paper, eval_tokens: 64}}}}"
    cells = {cell.name: cell for cell in sweep_of(tmp_path, text).cells}
    names = "alibi-small-1, t5-small-1, alibi-wide-1, t5-wide-1, alibi-small-2, alibi-wide-2, rotary-wide-7"
    assert ", ".join(cells) == names
    last = cells["rotary-wide-7"].config
    assert (last.model.hidden_size, last.training.seed, last.position.pos_emb) == (128, 7, "rotary")
    assert last["save"] == last["load"] == str(tmp_path / "runs/rotary-wide-7")
    assert cells["alibi-small-1"].evaluations[0].words == ("--protocol", "paper", "eval_tokens=64")
    some = sweep_of(tmp_path, text, only=["size=wide", "seed=1,7"])
    assert [cell.name for cell in some.cells] == ["alibi-wide-1", "t5-wide-1", "rotary-wide-7"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {seed: 1}", "grid: seed has no values"),
        ("axes: {}", "axes: no such part"),
        ("base: x", "base: give a list"),
        (f"settings: {{{TINY}}}\ngrid: {{pos_emb: [alibi, rotery]}}", "did you mean rotary"),
        (
            f"settings: {{{TINY}}}\ngrid: {{seed: [1]}}\nexclude: [{{sead: 1}}]",
            "is no point of the grid",
        ),
        ("grid: {seed: [1]}\nbase: [configs/126M.yml]", "did you mean"),
    ],
)
def test_a_bad_sweep_is_one_message(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        sweep_of(tmp_path, text)


def test_only_names_what_there_is(tmp_path):
    with pytest.raises(UserError, match="seed = 1, 2"):
        sweep_of(tmp_path, f"settings: {{{TINY}}}\ngrid: {{seed: [1, 2]}}", only=["seed=3"])
    with pytest.raises(UserError, match="no axis sed, it has seed - did you mean seed"):
        sweep_of(tmp_path, f"settings: {{{TINY}}}\ngrid: {{seed: [1, 2]}}", only=["sed=1"])


def test_operations_and_parameters_are_those_of_the_model():
    config = load([ROOT / "configs/demo.yml"], ["pos_emb=none", "attention_backend=eager"])
    length, vocab, model = 64, 256, from_config(config, vocab=256)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), torch.zeros(1, length, dtype=torch.long))
    # The definition of attention also computes what the mask then hides: as much again.
    hidden_half = 2 * config.model.num_layers * config.model.hidden_size * length
    assert counter.get_total_flops() == length * (
        forward_flops(config, vocab, length) + hidden_half
    )
    assert parameters(config, vocab) == pytest.approx(
        sum(one.numel() for one in model.parameters()), rel=0.02
    )
    paper = load([ROOT / "configs/125M.yml"])
    assert parameters(paper, 50304) == pytest.approx(162_322_944, rel=0.01)


@pytest.mark.parametrize("said", [{}, {"tail": 40, "stride": 24}])
def test_windows_are_counted_as_the_protocols_cut_them(tmp_path, said):
    with TokenWriter(tmp_path / "text", np.uint16, meta={}) as writer:
        writer.add(np.zeros(5000, dtype=np.uint16))
    lengths = [64, 96, 256] if said else [256, 512]
    request = Request(
        TokenFile.open(tmp_path / "text"), lengths, "0,1,0", eval_tokens=4000, windows=7, **said
    )
    for name, protocol in PROTOCOLS.items():
        cut = {windows.length: len(windows.ids) for windows in protocol(request)}
        assert window_counts(name, lengths, 4000, said | {"windows": 7}) == cut, name


def test_the_cost_is_of_what_is_missing(tmp_path):
    sweep = sweep_of(tmp_path, f"settings: {{{TINY}}}\ngrid: {{seed: [1, 2]}}")
    half, done = State("training", step=5), State("done", step=10)
    asked = cost(sweep, [half, done], 1e9)
    flops = (
        3 * 5 * 4 * 32 * forward_flops(sweep.cells[0].config, 50304, 32)
    )  # steps, windows, tokens
    assert asked == Cost(5 * 4 * 32, flops, flops / 0.35e9, asked.disk, measured=False)
    assert asked.disk == 2 * 16 * (
        12 * 2 * 64**2 + 2 * 50304 * 64
    )  # the last checkpoint, and room for the next
    assert cost(sweep, [done, done], 1e9).seconds == 0
