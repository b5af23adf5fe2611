"""Compiled code calls our Triton programs as one operation, without a break, to the last bit."""

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.attention import attention

pytest.importorskip("triton")
from megatron.attention import triton_kernel
from megatron.attention.triton_kernel import attention_backward_op, attention_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEGMENTS = (torch.arange(20) // 8).expand(2, -1)


def inputs(*, bias=True, weight=False) -> list[torch.Tensor | None]:
    """q, k, v [2, 1, 20, 16] laid out as a model has them, bias and weight."""
    fused = torch.randn(2, 20, 1, 3, 16).permute(3, 0, 2, 1, 4)
    tables = [torch.randn(1, 23) if has_table else None for has_table in (bias, weight)]
    return [x if x is None else x.to(DEVICE).requires_grad_() for x in (*fused.detach(), *tables)]


def test_compiled_code_has_no_break_and_the_same_bits():
    more = {"window": 6, "segments": SEGMENTS.to(DEVICE)}
    tensors = inputs(weight=True)

    def layer(q, k, v, bias, weight):
        out = attention(q * 1.5, k, v, bias, weight=weight, backend="triton", **more)
        return out.sin().square().sum()

    leaves = [x for x in tensors if x is not None]
    plain = layer(*tensors)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(*tensors)
    assert torch.equal(compiled, plain)
    expected = torch.autograd.grad(plain, leaves)
    gradients = torch.autograd.grad(compiled, leaves)
    assert all(map(torch.equal, gradients, expected))


def test_a_copy_of_the_code_has_operators_of_its_own():
    """Exported models carry it: an operator of the same name would take the place of the first."""
    spec = importlib.util.spec_from_file_location("a.copy", triton_kernel.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name in ("attention_op", "attention_backward_op"):
        assert getattr(copy, name)._qualname != getattr(triton_kernel, name)._qualname


def test_gradients_of_a_table_that_is_transposed_have_the_declared_strides():
    """T5 makes such tables. Neither torch's check of operations nor aot_eager looks at strides."""
    q, k, v, bias, _ = (x if x is None else x.detach() for x in inputs())
    bias = bias.t().contiguous().t()
    tensors = [q, k, v, bias, None, None, None, None]
    out, lse = attention_op(q, k, v, bias, None, None, 20)
    results = [out, lse, torch.ones_like(out), torch.ones_like(lse)]
    real = attention_backward_op(tensors, 20, results, True)
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in tensors]
        fake_results = [mode.from_tensor(x) for x in results]
        declared = attention_backward_op(fakes, 20, fake_results, True)
    assert [x.stride() for x in real] == [x.stride() for x in declared]
