"""Pictures of encodings: the numbers behind them, their files, and what has no picture."""

import torch

from megatron.positions import REGISTRY, Shape, build
from megatron.report.encoding_figures import draw, panels
from tests.checkpoints import checkpoint_of_bytes
from tests.support import NEEDED
from tools.check_encoding import main

SMALL = Shape(4, 8, 32, 64)
SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]


def test_every_encoding_has_finite_panels_on_the_same_scales():
    for name in REGISTRY:
        drawn = panels(build(name, SMALL, **NEEDED.get(name, {})).eval(), 512)
        assert all(panel.values.isfinite().all() for panel in drawn), name
    angle = torch.arange(512).double()[:, None] * 10.0 ** -torch.arange(4).double()
    rotary = panels(build("rotary", SMALL), 512)[0].values[0]
    torch.testing.assert_close(rotary.double(), angle.cos().mean(dim=1), rtol=0, atol=1e-4)
    bias, kernel = draw(panels(build("alibi", SMALL), 16384), "alibi").axes[:2]
    assert bias.get_title(loc="left") == "bias, cut at -12"
    assert bias.get_ylim()[0] == -12
    at, values = bias.lines[0].get_data()
    assert [*at[:4], at[-1]] == [0, 1, 2, 3, 16383]
    assert kernel.lines[0].get_ydata()[1] == torch.tensor(values[1]).exp()


def test_the_command_draws_an_encoding_or_a_checkpoint_and_says_what_cannot_be_drawn(
    tmp_path, capsys
):
    picture = tmp_path / "a.svg"
    words = ["--plot", str(picture), "--length", "300"]
    assert main(["rotary", *words, "--option", "base=500"]) == 0
    assert ">rotary {base: 500}</text>" in picture.read_text()
    checkpoint_of_bytes(tmp_path / "run", *SHAPE, "pos_emb=kerple_log", "pos_emb_shared=false")
    assert main([str(tmp_path / "run"), *words]) == 0
    assert {path.name for path in tmp_path.glob("*.svg")} == {"a.svg", "a-1.svg"}
    assert main(["none", *words]) == 0
    assert "none: nothing to draw" in capsys.readouterr().out
