"""Attention on CUDA by our own Triton programs, with exact gradients of the distance tables.

What they can compute, and their two passes as operations that torch.compile keeps whole.
"""

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.attention.eager import ScoreBias
from megatron.attention.triton_passes import (
    KernelInputs,
    backward_pass,
    empty_by_length,
    forward_pass,
)

LARGEST_HEAD = 128
MOST_PROGRAMS = 65535  # along the second dimension of CUDA's grid
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# An exported model carries this file too: a second operator of one name would end the first.
LIBRARY = __name__.replace(".", "_")


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    weight: Tensor | None,
    window: int | None,
    chunk: int | None,
    segments: Tensor | None,
    index_bias: Callable[[Tensor, Tensor], Tensor] | None,
    score_bias: ScoreBias | None = None,
) -> Tensor:
    """See megatron.attention.attention; `refusal` gives no reason against it."""
    assert index_bias is None
    keys = k.shape[2]
    window = min(window or keys, keys)
    chunk = min(chunk or keys, keys)
    if segments is not None:
        segments = segments.to(torch.int32).contiguous()
    u = w = None
    if score_bias is not None:
        u = None if score_bias.u is None else score_bias.u[..., 0]
        w = score_bias.w[..., 0]
    out, _ = attention_op(q, k, v, bias, weight, segments, window, chunk, u, w)
    return out


def refusal(q: Tensor, *, index_bias: bool = False, content_rank: int = 0) -> str | None:
    """Why these inputs are not for Triton, in one sentence, or None."""
    if importlib.util.find_spec("triton") is None:
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
    if index_bias:
        return "it reads biases from a table by distance, not by indices"
    if content_rank > 1:
        return f"it knows biases by content of rank one, not {content_rank}"
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
    chunk: int,
    u: Tensor | None = None,
    w: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse, as `forward_pass` has them; the arguments are those of `KernelInputs`."""
    return forward_pass(KernelInputs(q, k, v, bias, weight, segments, window, chunk, u, w))


@attention_op.register_fake
def _(q, k, v, bias, weight, segments, window, chunk, u=None, w=None):
    return empty_by_length(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{LIBRARY}::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    segments: Tensor | None,
    window: int,
    chunk: int,
    u: Tensor | None,
    w: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wants_tables: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, bias, weight, u and w; empty where there is or is wanted none."""
    inputs = KernelInputs(q, k, v, bias, weight, segments, window, chunk, u, w)
    gradients = backward_pass(dout, inputs, out, lse, wants_tables=wants_tables)
    found = []
    for gradient, x in zip(gradients, (q, k, v, bias, weight, u, w), strict=True):
        if gradient is None or x is None:
            found.append(q.new_empty(0))
        else:
            found.append(gradient.to(x.dtype))
    return found


@attention_backward_op.register_fake
def _(dout, q, k, v, bias, weight, segments, window, chunk, u, w, out, lse, wants_tables):
    found = [empty_by_length(x) for x in (q, k, v)]
    # Gradients of tables are contiguous, also where a table is not.
    for x in (*((bias, weight) if wants_tables else (None, None)), u, w):
        found.append(q.new_empty(0) if x is None else x.new_empty(x.shape))
    return found


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.chunk, u, w = inputs
    ctx.save_for_backward(*tensors, u, w, *output)


def _backward(ctx, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, u, w, out, lse = ctx.saved_tensors
    sizes = (ctx.window, ctx.chunk)
    wanted = ctx.needs_input_grad
    found = attention_backward_op(dout, *tensors, *sizes, u, w, out, lse, wanted[3] or wanted[4])
    dq, dk, dv, dbias, dweight, du, dw = (x if x.numel() else None for x in found)
    return dq, dk, dv, dbias, dweight, None, None, None, du, dw


attention_op.register_autograd(_backward, setup_context=_setup_context)
