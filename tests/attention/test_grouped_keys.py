"""Fewer heads of keys and values than of queries, which are not repeated in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.attention import attend
from megatron.attention.terms import Terms
from tests.count_operations import NO_LAUNCH

BATCH, HEADS, KEY_HEADS, LENGTH, HEAD_DIM = 2, 8, 2, 48, 16
SLOPES = torch.linspace(0.1, 1, HEADS)[:, None]
BIAS = -torch.arange(LENGTH).float() * SLOPES


class LargeKeys(TorchDispatchMode):
    """Counts tensors as large as repeated keys that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        name, _, _ = function.__name__.partition(".")
        # Output and gradient of the queries are as large.
        allowed = name in NO_LAUNCH or "attention" in name
        for output in outputs:
            if isinstance(output, torch.Tensor) and not allowed:
                self.count += output.numel() >= BATCH * HEADS * LENGTH * HEAD_DIM
        return result


def inputs(key_heads: int = KEY_HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, heads, LENGTH, HEAD_DIM) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_plain_attention_repeats_no_key():
    q, k, v = inputs()
    gradient = torch.ones_like(q)
    with LargeKeys() as made:
        out = attend(q, k, v, Terms())
        torch.autograd.grad(out, (q, k, v), gradient)
    assert made.count == 0


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_grouped_keys_are_keys_repeated_by_hand(backend, key_heads, bias):
    q, k, v = inputs(key_heads)
    out = attend(q, k, v, Terms(bias=bias), backend)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide_q, wide_k, wide_v = wide
    repeated_k, repeated_v = (
        x.repeat_interleave(HEADS // key_heads, dim=1) for x in (wide_k, wide_v)
    )
    scores = wide_q @ repeated_k.mT / HEAD_DIM**0.5
    index = torch.arange(LENGTH)
    distance = index[:, None] - index
    if bias is not None:
        scores = scores + bias[:, distance.clamp(min=0)]
    expected = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ repeated_v
    expected_gradients = torch.autograd.grad(expected.square().sum(), wide)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-5, rtol=1e-5)
