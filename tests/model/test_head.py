"""The mean loss that never holds all logits: values, gradients and memory."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model import head
from tools.bench import peak


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("block", [7, 64])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_mean_loss_and_its_gradients_are_those_of_the_cross_entropy_in_float64(
    dtype, tolerance, block, some, biased, monkeypatch
):
    monkeypatch.setattr(head, "HEAD_TOKENS", block)
    x, matrix = torch.randn(50, 24).to(dtype), torch.randn(301, 24).to(dtype)
    labels, counted = torch.randint(301, (50,)), torch.ones(50, dtype=torch.bool)
    if some:
        counted = torch.rand(50) < 0.7
        counted[:7] = False  # a whole block
    inputs = [x, matrix, torch.randn(301).to(dtype)][: 3 if biased else 2]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = F.cross_entropy(F.linear(*exact)[counted], labels[counted])
    ours = [tensor.requires_grad_() for tensor in inputs]
    loss = head.mean_loss(*ours[:2], labels, counted if some else None, *ours[2:])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    scale = 2.0**12  # a loss scale, as float16 needs it
    gradients = torch.autograd.grad(loss * scale, ours)
    exact_gradients = torch.autograd.grad(expected * scale, exact)
    for gradient, right in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - right).norm() / right.norm() < tolerance


def test_one_token_many_times_does_not_overflow_in_float16():
    x, matrix = torch.full((2048, 8), 40.0).half(), torch.zeros(100, 8).half().requires_grad_()
    head.mean_loss(x, matrix, torch.zeros(2048, dtype=torch.long)).backward()
    torch.testing.assert_close(
        matrix.grad[0].float(), torch.full((8,), -40 * 0.99), rtol=1e-3, atol=0.0
    )


def test_the_mean_loss_needs_the_memory_of_a_block_not_of_all_logits(monkeypatch):
    monkeypatch.setattr(head, "HEAD_TOKENS", 256)
    x = torch.randn(2048, 16, requires_grad=True)
    matrix = torch.randn(50304, 16, requires_grad=True)
    labels = torch.randint(50304, (2048,))
    block = 256 * 50304 * 4  # bytes: all 2048 tokens' logits are 8 of these
    assert peak(lambda: head.mean_loss(x, matrix, labels).backward()) < 4 * block
