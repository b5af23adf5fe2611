"""Attention on CUDA by our own Triton programs, with exact gradients of the distance tables.

What they can compute, and their two passes as operations that torch.compile keeps whole.
"""

import importlib.util
import math
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.terms import Terms
from megatron.attention.triton_passes import Call, backward_pass, empty_by_length, forward_pass

INSTALLED = importlib.util.find_spec("triton") is not None  # a search that torch 2.9 cannot compile
LARGEST_HEAD = 128
MOST_PROGRAMS = 65535  # along the second dimension of CUDA's grid
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# An exported model carries this file too: a second operator of one name would end the first.
LIBRARY = __name__.replace(".", "_")


def triton_attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """See megatron.attention.attention; `refusal` gives no reason against it."""
    assert terms.index_bias is None
    assert terms.scores is None
    assert terms.chunk is None
    keys = k.shape[2]
    window = min(terms.window or keys, keys)
    bias, weight, u, w, _ = terms.tensors
    u, w = (None if x is None else x[..., 0] for x in (u, w))
    out, lse = attention_op(q, k, v, bias, weight, terms.segments, window, u, w)
    return out, lse * math.log(2) if terms.needs_lse else None


def refusal(q: Tensor, terms: Terms) -> str | None:
    """Why these inputs are not for Triton, in one sentence, or None."""
    if not INSTALLED:
        return "the package triton is not installed"
    interpreted = q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if q.device.type != "cuda" and not interpreted:
        return f"it runs on CUDA devices, not on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"it knows float16, bfloat16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > LARGEST_HEAD:
        return f"head_dim {q.shape[3]} is more than {LARGEST_HEAD}"
    if q.shape[0] * q.shape[1] > MOST_PROGRAMS:
        return f"batch {q.shape[0]} times heads {q.shape[1]} is more than {MOST_PROGRAMS}"
    return None


@torch.library.custom_op(f"{LIBRARY}::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    segments: Tensor | None,
    window: int,
    u: Tensor | None = None,
    w: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse, as `forward_pass` has them; the arguments are those of `Call`."""
    return forward_pass(Call((q, k, v, bias, weight, segments, u, w), window))


@attention_op.register_fake
def _(q, *_):
    return empty_by_length(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{LIBRARY}::attention_backward", mutates_args=())
def attention_backward_op(
    inputs: Sequence[Tensor | None], window: int, results: Sequence[Tensor], wants_tables: bool
) -> list[Tensor]:
    """Gradients of q, k, v, bias, weight, u and w; empty where there is or is wanted none.

    inputs: tensors of `attention_op`; results: its output and lse, and the gradients of both
    """
    q, k, v, bias, weight, _, u, w = inputs
    out, lse, dout, dlse = results
    call = Call(inputs, window)
    gradients = backward_pass(dout, dlse, call, out, lse, wants_tables=wants_tables)
    numbers = []
    for gradient, x in zip(gradients, (q, k, v, bias, weight, u, w), strict=True):
        if gradient is None or x is None:
            numbers.append(call.q.new_empty(0))
            continue
        if x is bias or x is weight:
            gradient = F.pad(gradient, (0, x.shape[1] - gradient.shape[1]))
        numbers.append(gradient.to(x.dtype))
    return numbers


@attention_backward_op.register_fake
def _(inputs, window, results, wants_tables):
    q, k, v, bias, weight, _, u, w = inputs
    numbers = [empty_by_length(x) for x in (q, k, v)]
    # Gradients of tables are contiguous, also where a table is not.
    for x in (*((bias, weight) if wants_tables else (None, None)), u, w):
        numbers.append(q.new_empty(0) if x is None else x.new_empty(x.shape))
    return numbers


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, u, w = inputs
    ctx.save_for_backward(*tensors, u, w, *output)


def _backward(ctx, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    wants_tables = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    results = [out, lse, dout, dlse / math.log(2)]
    gradients = attention_backward_op(inputs, ctx.window, results, wants_tables)
    *tensors, du, dw = (x if x.numel() else None for x in gradients)
    return *tensors, None, None, du, dw


attention_op.register_autograd(_backward, setup_context=_setup_context)
