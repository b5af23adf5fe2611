"""The one attention of the project, causal with a bias by head and distance, and the choice of its backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.attention.eager import eager
from megatron.attention.flex import flex
from megatron.attention.flex import refusal as flex_refusal
from megatron.attention.sdpa import sdpa
from megatron.attention.self_check import check
from megatron.attention.triton_kernel import refusal as triton_refusal
from megatron.attention.triton_kernel import triton_attention
from megatron.errors import UserError

IndexBias = Callable[[Tensor, Tensor], Tensor]
OnScores = Callable[[Tensor], Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    segments: Tensor | None = None,
    index_bias: IndexBias | None = None,
    on_scores: OnScores | None = None,
    backend: str = "auto",
    self_check: bool = True,
) -> Tensor:
    """Causal attention with a bias that depends on head and distance.

    q [batch, heads, queries, head_dim] are the last `queries` of the keys' positions;
    k, v [batch, heads, keys, head_dim];
    bias [heads, >= keys] float32: bias[h, d] is added to q·k/√head_dim where the key stands d tokens back;
    weight, same shape: multiplies q·k/√head_dim before the bias (KERPLE's weight kernels only);
    window: a query sees the last `window` keys up to its own; keys further back are out of sight;
    chunk: a query sees its own chunk of that many keys and the one before (blockwise causal attention, xPos);
    segments [batch, keys] int: a query sees only keys of its own document;
    index_bias(indices [queries], indices [keys]) -> [heads, queries, keys]: added, for a bias that depends on the
    indices themselves; on_scores [batch, heads, queries, keys] -> same: after all biases, where content decides;
    backend: see `choose`; self_check: compare a compiled backend with the definition at its first use of a kind.
    Returns [batch, heads, queries, head_dim] in q's dtype. ValueError where shapes disagree or the backend refuses.
    """
    _check(q, k, v, {"bias": bias, "weight": weight}, {"window": window, "chunk": chunk}, segments)
    needs = Needs(
        q,
        tables=bias is not None or weight is not None,
        narrowed=window is not None or chunk is not None or segments is not None,
        index_bias=index_bias is not None,
        content=on_scores is not None,
        gradient=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, bias, weight)),
    )
    name = choose(backend, needs).backend
    more: dict[str, Any] = {
        "weight": weight,
        "window": window,
        "chunk": chunk,
        "segments": segments,
    }
    if self_check and name not in TRUSTED and not torch.compiler.is_compiling():
        check(name, BACKENDS[name], q, k, v, bias, **more)
    more["index_bias"] = index_bias
    if on_scores is not None:
        more["on_scores"] = on_scores
    return BACKENDS[name](q, k, v, bias, **more)


@dataclass(frozen=True)
class Needs:
    """What decides which backends can compute an attention.

    q [batch, heads, queries, head_dim]: any tensor of the device, dtype and head_dim that queries have;
    tables: there is a bias or weight by distance; narrowed: a window, chunk or segments hide keys;
    content: scores are rewritten by an encoding that looks at content; gradient: one is wanted
    """

    q: Tensor
    tables: bool = False
    narrowed: bool = False
    index_bias: bool = False
    content: bool = False
    gradient: bool = False


class Choice(NamedTuple):
    """A backend and, where `auto` chose it, why."""

    backend: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.backend if self.reason is None else f"{self.backend} (auto: {self.reason})"


def choose(backend: str, needs: Needs) -> Choice:
    """The backend that `auto` stands for, or `backend` itself; UserError where it is unknown or cannot do it."""
    if backend == "auto":
        return _best(needs)
    if backend not in BACKENDS:
        raise UserError(
            f"attention_backend: {backend!r} is not known; choose from auto, {', '.join(BACKENDS)}"
        )
    reason = refusal(backend, needs)
    if reason is not None:
        other = "eager" if needs.content else "auto or sdpa"
        raise UserError(
            f"attention_backend: {backend} cannot compute this: {reason}; choose {other}"
        )
    return Choice(backend)


def _best(needs: Needs) -> Choice:
    if needs.content:
        return Choice("eager", "the encoding looks at content")
    if needs.q.device.type != "cuda":
        return Choice("sdpa", f"on the {needs.q.device.type.upper()}")
    what = {
        "index bias": needs.index_bias,
        "distance table": needs.tables,
        "narrowed sight": needs.narrowed,
    }
    why = " and ".join(name for name, there in what.items() if there)
    if not why:
        return Choice("sdpa", "plain causal on CUDA")
    why += " on CUDA"
    for name in ("triton", "flex"):
        reason = refusal(name, needs)
        if reason is None:
            return Choice(name, why)
        why += f"; not {name}: {reason}"
    return Choice("sdpa", why)


def refusal(backend: str, needs: Needs) -> str | None:
    """Why a backend cannot compute this, in one sentence, or None."""
    if backend == "eager":
        return None
    if needs.content:
        return "the encoding looks at content"
    return REFUSALS[backend](needs) if backend in REFUSALS else None


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "eager": eager,
    "sdpa": sdpa,
    "flex": flex,
    "triton": triton_attention,
}
"""What `attention_backend` may name, beside auto."""
REFUSALS: dict[str, Callable[[Needs], str | None]] = {
    "flex": lambda needs: flex_refusal(
        needs.q, index_bias=needs.index_bias, gradient=needs.gradient
    ),
    "triton": lambda needs: triton_refusal(needs.q, index_bias=needs.index_bias or None),
}
"""What some of them cannot compute, beside encodings that look at content."""
TRUSTED = {"eager", "sdpa"}  # no compiler of ours stands between source and result


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: dict[str, Tensor | None],
    reaches: dict[str, int | None],
    segments: Tensor | None,
) -> None:
    if (
        k.shape != v.shape
        or q.shape[:2] != k.shape[:2]
        or q.shape[3] != k.shape[3]
        or q.shape[2] > k.shape[2]
    ):
        raise ValueError(
            f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together"
        )
    heads, keys = k.shape[1], k.shape[2]
    for name, table in tables.items():
        if table is not None and (
            table.dim() != 2 or table.shape[0] != heads or table.shape[1] < keys
        ):
            raise ValueError(
                f"attention: {name} {list(table.shape)} must be [{heads}, at least {keys}]"
            )
    for name, reach in reaches.items():
        if reach is not None and reach < 1:
            raise UserError(f"{name}: {reach} must be at least 1, or left out")
    if segments is not None and segments.shape != (k.shape[0], keys):
        raise ValueError(f"attention: segments {list(segments.shape)} must be {[k.shape[0], keys]}")
