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
    as_table,
    backward_pass,
    empty_by_length,
    forward_pass,
    padded_tables,
    reach_of,
    two_floats,
)

LARGEST_HEAD = 128
MOST_PROGRAMS = 65535  # along the second dimension of CUDA's grid
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
    """See megatron.attention.attention; ValueError with the reason where `refusal` gives one."""
    rank = 0 if score_bias is None else score_bias.w.shape[3]
    reason = refusal(q, index_bias=index_bias is not None, content_rank=rank)
    if reason is not None:
        raise ValueError(f"attention_backend: triton cannot compute this: {reason}")
    keys = k.shape[2]
    window = min(window or keys, keys)
    chunk = min(chunk or keys, keys)
    if segments is not None:
        segments = segments.to(torch.int32).contiguous()
    u = w = None
    if score_bias is not None:
        u = None if score_bias.u is None else score_bias.u[..., 0]
        w = score_bias.w[..., 0]
    return attention_op(q, k, v, bias, weight, segments, window, chunk, u, w)[0]


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


@torch.library.custom_op("megatron::attention", mutates_args=())
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
    """Output and lse, as `forward_pass` has them, for whole tables [heads, >= keys]."""
    tables = padded_tables(k, bias, weight, window)
    content = None if w is None else two_floats(u, w)
    reach = reach_of(q, k, bias, weight, u, w)
    return forward_pass(q, k, v, tables, segments, window, chunk, content, reach)


@attention_op.register_fake
def _(q, k, v, bias, weight, segments, window, chunk, u=None, w=None):
    return empty_by_length(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("megatron::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    segments: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int,
    chunk: int,
    wants_dbias: bool,
    wants_dweight: bool,
    u: Tensor | None = None,
    w: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias, dweight, du and dw.

    A gradient of a table that is not wanted is empty, and one of a u or w that does not exist.
    """
    content = None if w is None else two_floats(u, w)
    dq, dk, dv, dbias, dweight, du, dw = backward_pass(
        *(dout, q, k, v, padded_tables(k, bias, weight, window)),
        *(segments, out, lse, window, chunk, content, reach_of(q, k, bias, weight, u, w)),
        wants_tables=wants_dbias or wants_dweight,
    )
    dbias = as_table(dbias, bias) if bias is not None and wants_dbias else q.new_empty(0)
    dweight = as_table(dweight, weight) if weight is not None and wants_dweight else q.new_empty(0)
    du = q.new_empty(0) if du is None or u is None else du.to(u.dtype)
    dw = q.new_empty(0) if dw is None or w is None else dw.to(w.dtype)
    return dq, dk, dv, dbias, dweight, du, dw


@attention_backward_op.register_fake
def _(
    dout, q, k, v, bias, weight, segments, out, lse, window, chunk, wants_dbias, wants_dweight,
    u=None, w=None,
):  # fmt: skip
    # Gradients of tables are contiguous, also where a table is not.
    dbias = bias.new_empty(bias.shape) if wants_dbias else q.new_empty(0)
    dweight = weight.new_empty(weight.shape) if wants_dweight else q.new_empty(0)
    du = q.new_empty(0) if u is None else u.new_empty(u.shape)
    dw = q.new_empty(0) if w is None else w.new_empty(w.shape)
    return empty_by_length(q), empty_by_length(k), empty_by_length(v), dbias, dweight, du, dw


def _setup_context(ctx, inputs, output) -> None:
    *tensors, window, chunk, u, w = inputs
    ctx.save_for_backward(*tensors, *output, u, w)
    ctx.window, ctx.chunk = window, chunk


def _backward(ctx, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wants_dbias, wants_dweight = ctx.needs_input_grad[3:5]
    *saved, u, w = ctx.saved_tensors
    dq, dk, dv, dbias, dweight, du, dw = attention_backward_op(
        dout, *saved, ctx.window, ctx.chunk, wants_dbias, wants_dweight, u, w
    )
    tables = (dbias if wants_dbias else None, dweight if wants_dweight else None)
    of_content = (None if u is None else du, None if w is None else dw)
    return dq, dk, dv, *tables, None, None, None, *of_content


attention_op.register_autograd(_backward, setup_context=_setup_context)
