"""FIRE in pieces, and far beyond the lengths of the authors' numbers."""

from functools import partial

import torch

from megatron.attention import attention
from megatron.positions import Shape, build, fire
from tools.bench import peak

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def test_long_texts_need_no_square_of_memory(monkeypatch):
    monkeypatch.setattr(fire, "NUMBERS", 2**16)
    position = build("fire", Shape(1, 4, 4, 64), mlp_layers=[4])
    q, k, v = torch.randn(3, 1, 1, 2816, 4)
    # The square alone is 32 MB for one head, and the MLP's values four times that. A block of 256
    # queries is 3 MB, and a few exist at a time.
    attend = partial(attention, q, k, v, index_bias=position.index_bias, backend="sdpa")
    assert peak(torch.no_grad()(attend)) < 10e6
