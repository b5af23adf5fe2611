"""Packages of others bring kinds of layers and encodings, by entry points."""

import sys

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.layer_kinds import LAYERS
from megatron.model import from_config
from megatron.model.size import parameters
from megatron.positions import REGISTRY

SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=16"]
CODE = """
from torch import nn

from megatron.layer_kinds import Layer, register_layer
from megatron.positions import Position, register


@register_layer("mean")
class Mean(Layer):
    options = {"stride": int}

    def __init__(self, model):
        super().__init__()
        self.stride = self.sizes(model)["stride"]
        self.matrix = nn.Linear(model.hidden_size, model.hidden_size)

    @classmethod
    def sizes(cls, model):
        return {"stride": model.layer_args.get("stride", 1)}

    def forward(self, x, inputs):
        return self.matrix(x / self.stride)

    def operations(self, keys):
        return 0


@register("still")
class Still(Position):
    pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "of_others.py").write_text(CODE)
    facts = tmp_path / "of_others-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: of_others\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[megatron.layers]\nmean = of_others\n[megatron.positions]\nstill = of_others\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    LAYERS.pop("mean", None)
    REGISTRY.pop("still", None)
    sys.modules.pop("of_others", None)


def test_a_package_is_imported_when_a_configuration_names_what_it_brings(package):
    config = load([], [*SHAPE, "layers=[mean, attention]", "stride=2", "pos_emb=still"])
    assert config.model.layer_args == {"stride": 2}
    gpt = from_config(config, vocab=50)
    assert gpt.layers[0].attention.stride == 2
    assert gpt(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 50)
    assert parameters(config, 50).whole == sum(x.numel() for x in gpt.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layers=[mean, attention]"], "layers: no layer is called 'mean'"),
        (["pos_emb=still"], "pos_emb: no encoding is called 'still'"),
        (["layer_args={v_head_dim: 3}"], r"v_head_dim: no layer \(attention\) has this option"),
        (["layers=mla", "v_head_dim=far"], "v_head_dim: 'far' is not a whole number from 1 to"),
    ],
)
def test_names_and_options_that_nobody_brings_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        load([], [*SHAPE, *words])
