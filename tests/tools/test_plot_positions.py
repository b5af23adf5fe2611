"""The pictures: the numbers behind them, their files, and a message where one is missing."""

import json
from math import exp
from xml.etree import ElementTree

import pytest
import torch

from megatron.evaluation.attention_probes import sampled
from megatron.positions import REGISTRY, Shape, build
from megatron.report.curves import write
from megatron.report.encoding_figures import (
    derivative_panels,
    draw,
    effective_panel,
    panels,
    training_panels,
)
from tests.checkpoints import checkpoint_of_bytes
from tests.support import NEEDED
from tools.plot_positions import main

SMALL = Shape(4, 8, 32, 64)
SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]


def test_the_sampled_distances_hold_every_near_one_and_both_ends():
    at = sampled(16384, 100).tolist()
    assert at[:6] == [0, 1, 2, 3, 4, 5]
    assert at[-1] == 16383
    assert at == sorted(set(at))


def test_every_encoding_can_be_drawn_or_has_no_picture(tmp_path):
    for name in REGISTRY:
        found = panels(build(name, SMALL, **NEEDED.get(name, {})).eval(), 512)
        assert all(panel.values.isfinite().all() for panel in found), name
        if name in ("alibi", "fire", "rotary"):
            write(draw(found, name), tmp_path / f"{name}.svg")
            text = (tmp_path / f"{name}.svg").read_text()
            words = "".join(ElementTree.fromstring(text).itertext())
            assert all(part in words for part in (name, "distance d (tokens)", found[0].title))


def test_the_panels_show_the_hooks_on_the_same_scales():
    angle = torch.arange(512).double()[:, None] * 10.0 ** -torch.arange(4).double()
    rotary = panels(build("rotary", SMALL), 512)[0].values[0]
    torch.testing.assert_close(rotary.double(), angle.cos().mean(dim=1), rtol=0, atol=1e-4)
    found = panels(build("alibi", SMALL), 16384)
    assert [panel.title for panel in found] == ["bias", "kernel exp(bias)"]
    torch.testing.assert_close(found[1].values, found[0].values.exp())
    bias, kernel = draw(found, "alibi").axes[:2]
    assert (bias.get_xscale(), kernel.get_yscale()) == ("function", "linear")
    assert bias.get_title(loc="left") == "bias, cut at -12"
    assert bias.get_ylim()[0] == -12


def test_the_tool_draws_what_is_named_with_its_options_and_says_what_cannot_be_drawn(
    tmp_path, capsys
):
    words = ["--output", str(tmp_path), "--length", "300"]
    assert main(["rotary", *words, "--option", "base=500"]) == 0
    assert main(["none", *words]) == 0
    assert "none: nothing to draw" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rotary.png", "rotary.svg"]


def test_a_checkpoint_gives_its_encodings(tmp_path, capsys):
    folder = tmp_path / "run"
    checkpoint_of_bytes(folder, *SHAPE, "pos_emb=kerple_log", "pos_emb_shared=false")
    assert main(["--checkpoint", str(folder), "--length", "100"]) == 0
    names = {path.name for path in (folder / "plots/global_step10").glob("*.svg")}
    assert names == {"encoding-layer0.svg", "encoding-layer1.svg"}
    checkpoint_of_bytes(tmp_path / "none", *SHAPE, "pos_emb=none")
    assert main(["--checkpoint", str(tmp_path / "none")]) == 0
    assert "none, seed 1234, step 10: nothing to draw" in capsys.readouterr().out


def test_an_effective_length_is_where_the_bias_falls_below_minus_2():
    """KERPLE, appendix A.5: -s d < -2 from d > 2 / s on, -p log(1 + a d) from (e^(2/p) - 1) / a."""
    alibi = build("alibi", SMALL)
    log = build("kerple_log", SMALL, p=[2.0, 1.0, 0.5, 0.01], a=[0.3, 0.3, 0.3, 0.3])
    panel = effective_panel({"alibi": alibi, "log": log}, 1000)
    expected = {
        "alibi": [2 / slope for slope in (0.25, 0.0625, 0.015625, 0.00390625)],
        "log": [(exp(2 / p) - 1) / 0.3 for p in (2.0, 1.0, 0.5)],  # the fourth ends beyond it
    }
    assert panel.labels == ("alibi", "log")
    for label, counts in zip(panel.labels, panel.values, strict=True):
        for distance in range(1000):
            assert counts[distance] == sum(end < distance for end in expected[label])


def test_a_derivative_is_that_of_the_kernel():
    kernel, change = derivative_panels(build("alibi", SMALL), 100)
    distance = torch.arange(99)
    expected = (exp(-0.25) - 1) * torch.exp(-0.25 * distance)
    torch.testing.assert_close(change.values[0], expected, rtol=0, atol=1e-6)
    assert kernel.values[0, 0] == 1
    assert derivative_panels(build("rotary", SMALL), 100) == []


def test_a_training_is_drawn_from_the_numbers_of_its_log(tmp_path, capsys):
    run = tmp_path / "run"
    checkpoint_of_bytes(run, *SHAPE, "pos_emb=kerple_log")
    log = run / "metrics.jsonl"
    words = ["--checkpoint", str(run), "--figure", "training", "--length", "1000"]
    assert main(words) == 1
    assert "cannot be read" in capsys.readouterr().err
    lines = [{"step": 1, "kind": "train"}]
    log.write_text(json.dumps(lines[0]) + "\n")
    assert main(words) == 1
    assert "give the run of an encoding that learns" in capsys.readouterr().err
    for step, p in ((10, 1.0), (20, 2.0)):
        numbers = {"p": [p] * 4, "a": [0.1, 0.2, 0.3, 0.4]}
        lines.append({"step": step, "kind": "train", "position": numbers})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(words) == 0
    assert (run / "plots/global_step10/encoding-training.svg").exists()
    found = training_panels(lines[1:], build("kerple_log", SMALL), 1000)
    assert [panel.title for panel in found] == ["bias, step 10", "bias, step 20"]
    distance = torch.arange(1000)
    for panel, p in zip(found, (1, 2), strict=True):
        expected = -p * torch.log1p(0.2 * distance)
        torch.testing.assert_close(panel.values[1], expected, rtol=0, atol=1e-5)


def test_a_figure_of_several_runs_has_a_line_for_each(tmp_path, capsys):
    folders = []
    for name in ("alibi", "kerple_log"):
        folders.append(str(tmp_path / name))
        checkpoint_of_bytes(tmp_path / name, *SHAPE, f"pos_emb={name}")
    plots = str(tmp_path / "plots")
    several = ["--checkpoint", *folders, "-o", plots]
    assert main([*several, "--figure", "effective_length"]) == 0
    text = (tmp_path / "plots/effective_length.svg").read_text()
    assert "alibi" in text
    assert "kerple_log" in text
    assert main(["rotary", "--figure", "effective_length"]) == 1
    assert "rotary: adds no bias by distance - leave it out" in capsys.readouterr().err
    assert main(["rotary", "--figure", "derivative"]) == 0
    assert "rotary: nothing to draw, no hook of this figure" in capsys.readouterr().out
    for words in (several, ["alibi", "--figure", "training"]):
        with pytest.raises(SystemExit):
            main(words)
    shown = capsys.readouterr().err
    assert "--output: would hold several runs" in shown
    assert "--figure training: give --checkpoint" in shown
