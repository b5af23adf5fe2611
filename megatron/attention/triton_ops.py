"""Our Triton programs as operations that torch.compile keeps whole.

Inside compiled code `triton_attention` calls these. Outside it calls autograd's function, which
costs less for each call. Both run the same two passes.
"""

import torch
from torch import Tensor

from megatron.attention.triton_passes import (
    as_table,
    backward_pass,
    empty_by_length,
    forward_pass,
    padded_tables,
    reach_of,
    two_floats,
)


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
