"""The pictures: the numbers behind them, their files, and a message where one is missing."""

import json
from math import exp
from pathlib import Path
from xml.etree import ElementTree

import torch

from megatron.positions import REGISTRY, Shape, build
from megatron.report.curves import write
from megatron.report.encoding_figures import (
    derivative_panels,
    draw,
    effective_panel,
    panels,
    sampled,
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
        plotted = panels(build(name, SMALL, **NEEDED.get(name, {})).eval(), 512)
        assert all(panel.values.isfinite().all() for panel in plotted), name
        if name in ("alibi", "fire", "rotary"):
            write(draw(plotted, name), tmp_path / f"{name}.svg")
            text = (tmp_path / f"{name}.svg").read_text()
            words = "".join(ElementTree.fromstring(text).itertext())
            assert all(part in words for part in (name, "distance d (tokens)", plotted[0].title))


def test_the_panels_show_the_hooks_on_the_same_scales():
    angle = torch.arange(512).double()[:, None] * 10.0 ** -torch.arange(4).double()
    rotary = panels(build("rotary", SMALL), 512)[0].values[0]
    torch.testing.assert_close(rotary.double(), angle.cos().mean(dim=1), rtol=0, atol=1e-4)
    plotted = panels(build("alibi", SMALL), 16384)
    assert [panel.title for panel in plotted] == ["bias", "kernel exp(bias)"]
    torch.testing.assert_close(plotted[1].values, plotted[0].values.exp())
    bias, kernel = draw(plotted, "alibi").axes[:2]
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
    log = build("kerple_log", SMALL, p=[2.0, 1.0, 0.5, 0.01], a=[0.3, 0.3, 0.3, 0.3])
    panel = effective_panel({"alibi": build("alibi", SMALL), "log": log}, 1000)
    assert panel.labels == ("alibi", "log")
    ends = [[8, 32, 128, 512], [(exp(2 / p) - 1) / 0.3 for p in (2.0, 1.0, 0.5)]]
    for counts, ends_of_encoding in zip(panel.values, ends, strict=True):
        expected = [sum(end < distance for end in ends_of_encoding) for distance in range(1000)]
        assert counts.tolist() == expected


def test_a_derivative_is_that_of_the_kernel():
    _, change = derivative_panels(build("alibi", SMALL), 100)
    distance = torch.arange(99)
    expected = (exp(-0.25) - 1) * torch.exp(-0.25 * distance)
    torch.testing.assert_close(change.values[0], expected, rtol=0, atol=1e-6)
    assert derivative_panels(build("rotary", SMALL), 100) == []


def test_a_training_is_drawn_from_the_numbers_of_its_log(tmp_path):
    checkpoint_of_bytes(tmp_path, *SHAPE, "pos_emb=kerple_log")
    records = [{"step": 5, "position": {"p": [1.0] * 4, "a": [0.1] * 4}}]
    records.append({"step": 10, "position": {"p": [2.0] * 4, "a": [0.2] * 4}})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    assert main(["--checkpoint", str(tmp_path), "--figure", "training", "--length", "100"]) == 0
    assert (tmp_path / "plots/global_step10/encoding-training.svg").exists()
    plotted = training_panels(records, build("kerple_log", SMALL), 100)
    assert [panel.title for panel in plotted] == ["bias, step 5", "bias, step 10"]
    expected = -2 * torch.log1p(0.2 * torch.arange(100))
    torch.testing.assert_close(plotted[1].values[1], expected, rtol=0, atol=1e-5)


def test_a_figure_of_several_runs_has_a_line_for_each(tmp_path):
    words = ["--figure", "effective_length", "-o", str(tmp_path), "--checkpoint"]
    runs = [str(tmp_path / f"{name}/run") for name in ("alibi", "t5")]
    for run, name in zip(runs, ("alibi", "t5"), strict=True):
        checkpoint_of_bytes(Path(run), *SHAPE, f"pos_emb={name}")
    assert main([*words, *runs]) == 0
    text = (tmp_path / "effective_length.svg").read_text()
    assert all(run in text for run in runs)
