"""The pictures: the numbers behind them, their files, and a message where one is missing."""

from xml.etree import ElementTree

import torch

from megatron.positions import REGISTRY, Shape, build
from megatron.report.curves import write
from megatron.report.encoding_figures import draw, panels, sampled
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
