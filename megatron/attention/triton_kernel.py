"""Attention on CUDA by our own Triton programs, with exact gradients of the distance tables.

What they can compute, and how autograd and torch.compile reach their two passes.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.attention.content import ScoreBias
from megatron.attention.triton_ops import attention_op
from megatron.attention.triton_passes import (
    Tables,
    as_table,
    backward_pass,
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
    if torch.compiler.is_compiling():
        return attention_op(q, k, v, bias, weight, segments, window, chunk, u, w)[0]
    return _Attention.apply(q, k, v, bias, weight, segments, window, chunk, u, w)  # pyright: ignore[reportReturnType]


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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> Tensor:
        tables = padded_tables(k, bias, weight, window)
        content = None if w is None else two_floats(u, w)
        reach = reach_of(q, k, bias, weight, u, w)
        out, lse = forward_pass(q, k, v, tables, segments, window, chunk, content, reach)
        ctx.save_for_backward(q, k, v, bias, weight, segments, u, w, reach, *tables, out, lse)
        ctx.window, ctx.chunk = window, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, segments, u, w, reach, *tables, out, lse = ctx.saved_tensors
        content = None if w is None else two_floats(u, w)
        wants_dbias, wants_dweight = ctx.needs_input_grad[3:5]
        dq, dk, dv, dbias, dweight, du, dw = backward_pass(
            *(dout, q, k, v, Tables(*tables), segments, out, lse, ctx.window, ctx.chunk),
            *(content, reach),
            wants_tables=wants_dbias or wants_dweight,
        )
        dbias = as_table(dbias, bias) if wants_dbias else None
        dweight = as_table(dweight, weight) if wants_dweight else None
        du = None if du is None or u is None else du.to(u.dtype)
        dw = None if dw is None or w is None else dw.to(w.dtype)
        return dq, dk, dv, dbias, dweight, None, None, None, du, dw
