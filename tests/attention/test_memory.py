"""Attention on the CPU keeps no square of scores, with gradients too."""

import pytest
import torch

from megatron.attention import attention
from tools.bench import peak

HEADS, LENGTH = 3, 4096
SQUARE = 4 * HEADS * LENGTH**2  # bytes of all scores in float32


@pytest.mark.parametrize("kind", ["table", "product"])
def test_long_texts_need_no_square_of_memory(kind):
    fused = torch.randn(1, LENGTH, HEADS, 3, 64).permute(3, 0, 2, 1, 4)  # as the model has them
    q, k, v = (x.detach().requires_grad_() for x in fused)
    bias = torch.randn(HEADS, LENGTH, requires_grad=True)
    steps = torch.rand(1, HEADS, LENGTH) * 1e-3  # nothing may be skipped
    product = (torch.randn(1, HEADS, LENGTH), steps.cumsum(2))
    options = {"bias": bias} if kind == "table" else {"score_bias": product}

    def attend():
        out = attention(q, k, v, **options, backend="sdpa")
        torch.autograd.grad(out, [q, k, v], out.detach())

    assert peak(attend) < SQUARE / 4
