"""Causal attention with a bias by head and distance, and the choice of its backend."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.attention.eager import eager
from megatron.attention.flex import flex_backend
from megatron.attention.sdpa import sdpa
from megatron.attention.self_check import fault_of
from megatron.attention.terms import (
    BlockScores,
    Content,
    Terms,
    check_lengths,
    for_each_query_head,
    with_sink,
)
from megatron.attention.triton_kernel import refusal as triton_refusal
from megatron.attention.triton_kernel import triton_attention
from megatron.errors import UserError

logger = logging.getLogger(__package__)

Backend = Callable[[Tensor, Tensor, Tensor, Terms], tuple[Tensor, Tensor | None]]
"""From q, k, v and the terms: the output, and its lse where `needs_lse` asks for it."""
BACKENDS: dict[str, Backend] = {
    "eager": eager,
    "sdpa": sdpa,
    "triton": triton_attention,
    "flex": flex_backend,
}
"""Values of `attention_backend`, besides auto."""
BY_TRITON = {"bias", "weight", "window", "segments", "content", "sink", "needs_lse"}
COMPUTED = {
    "sdpa": BY_TRITON | {"chunk", "index_bias", "scores"},
    "triton": BY_TRITON,
    "flex": BY_TRITON,
}
"""The terms that a backend computes; eager, the definition, computes all. Others are refused."""
ADDED = ("index_bias", "bias", "weight", "window", "chunk", "segments", "content")
"""Terms that change plain causal attention."""
REASONS = {
    "on_scores": "the encoding looks at content",
    "scores": "the encoding gives scores by content",
    "index_bias": "it reads biases from a table by distance, not by indices",
}
"""Why a backend does not compute a term."""
TRUSTED = {"eager", "sdpa"}  # these need no compiler of ours
KERNELS = {"cuda": ("triton", "flex")}
"""What `auto` takes on a device before sdpa: each where the one before it has a fault."""
FAULTS: dict[tuple[str, str], str] = {}
"""What the self check says of a backend on a kind of device, for which `auto` leaves it out."""


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
    index_bias: Callable[[Tensor, Tensor], Tensor] | None = None,
    on_scores: Callable[[Tensor], Tensor] | None = None,
    score_bias: tuple[Tensor | None, Tensor] | None = None,
    block_scores: BlockScores | None = None,
    sink: Tensor | None = None,
    backend: str = "auto",
    self_check: bool = True,
) -> Tensor:
    """Causal attention with a bias that depends on head and distance.

    q [batch, heads, queries, head_dim]: the queries of the last `queries` keys' positions;
    k [batch, heads, keys, head_dim], v [batch, heads, keys, features], fewer or more;
    bias [heads, >= keys] float32: bias[h, d] is added to q·k/√head_dim of the key d tokens back;
    weight [heads, >= keys]: multiplies q·k/√head_dim before the bias (KERPLE's weight kernels);
    window: a query attends to the last `window` keys up to its own, all others are masked;
    chunk: a query attends to its own chunk of that many keys and to the one before (blockwise
    causal attention, xPos);
    segments [batch, keys] int: a query attends only to keys of its own document;
    index_bias(indices [queries], indices [keys]) -> [heads, queries, keys]: added, for a bias that
    depends on the indices themselves;
    on_scores [batch, heads, queries, keys] -> same: after all biases, where content decides;
    score_bias (u, w): adds u·(w of the key - w of the query's own key), u [batch, heads, queries]
    or None for ones, w [batch, heads, keys]; a last dimension of both is a rank above one. w may be
    float64;
    block_scores: the scores themselves, in place of q·k/√head_dim (`Position.block_scores`);
    sink [heads]: the score of one more key for every query, whose value is 0 (gpt-oss);
    backend: see `choose`;
    self_check: compare a compiled backend with the definition at its first use of a kind.

    Returns [batch, heads, queries, features] in q's dtype. ValueError if shapes disagree or the
    backend refuses. `auto` leaves out a compiled backend that has a fault, with one warning.
    """
    batch, heads, keys, head_dim = k.shape
    fits = {
        "q, k and v": (
            q.shape[:2] == k.shape[:2]
            and q.shape[3] == head_dim
            and q.shape[2] <= keys
            and v.shape[:3] == k.shape[:3]
        ),
        "bias": bias is None or _is_table(bias, heads, keys),
        "weight": weight is None or _is_table(weight, heads, keys),
        "sink": sink is None or sink.shape == (heads,),
        "segments": segments is None or segments.shape == (batch, keys),
        "score_bias": score_bias is None or _fits(*score_bias, q, k),
    }
    for name, is_right in fits.items():
        if not is_right:
            tensors = {"q": q, "k": k, "v": v, "bias": bias, "weight": weight, "segments": segments}
            shapes = [f"{key} {list(x.shape)}" for key, x in tensors.items() if x is not None]
            raise ValueError(f"attention: the shape of {name} does not fit: {', '.join(shapes)}")
    check_lengths(window=window, chunk=chunk)

    terms = Terms(
        bias,
        weight,
        window,
        chunk,
        segments,
        index_bias,
        on_scores,
        Content.of(score_bias, q.shape[2]),
        block_scores,
        sink,
    )
    return attend(q, k, v, terms, backend, self_check=self_check)


def _is_table(table: Tensor, heads: int, keys: int) -> bool:
    return table.dim() == 2 and table.shape[0] == heads and table.shape[1] >= keys


def _fits(u: Tensor | None, w: Tensor, q: Tensor, k: Tensor) -> bool:
    rank = w.shape[3:]
    u_fits = u is None or u.shape == (*q.shape[:3], *rank)
    return u_fits and w.shape == (*k.shape[:3], *rank) and len(rank) <= 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, backend: str = "auto", *, self_check: bool = True
) -> Tensor:
    """`attention`, with its options as a record; k and v may have fewer heads, one for a group."""
    terms = replace(terms, needs_lse=terms.sink is not None)
    pick = partial(choose, backend, q, terms, other_width=k.shape != v.shape)
    choice = first_choice = pick()
    if terms.chunk is not None and 2 * terms.chunk >= k.shape[2]:
        terms = replace(terms, chunk=None)  # it masks nothing
    group = q.shape[1] // k.shape[1]
    if choice.backend != "sdpa":
        k, v = for_each_query_head(k, group), for_each_query_head(v, group)
    if self_check and not torch.compiler.is_compiling():
        while (name := choice.backend) not in TRUSTED and (
            fault := fault_of(BACKENDS[name], q, k, v, terms=terms)
        ):
            if backend != "auto":
                raise UserError(
                    f"attention_backend: {name} {fault} - choose attention_backend: sdpa, or leave"
                    " out this check with attention_self_check: false"
                )
            FAULTS[name, q.device.type] = fault
            choice = pick()
        if choice != first_choice:
            logger.warning("attention_backend: %s", choice)
    out, lse = BACKENDS[choice.backend](q, k, v, terms)
    return out if lse is None else with_sink(out, lse, terms.sink)


class Choice(NamedTuple):
    """A backend and, if `auto` chose it, why."""

    backend: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.backend if self.reason is None else f"{self.backend} (auto: {self.reason})"


def joined(choices: Sequence[Choice]) -> Choice:
    """The choices of several layers as one: their backends, and the reasons of each."""
    distinct = list(dict.fromkeys(choices))
    if len(distinct) == 1:
        return distinct[0]
    backends = list(dict.fromkeys(choice.backend for choice in distinct))
    reasons = [f"{choice.backend}, {choice.reason}" for choice in distinct if choice.reason]
    return Choice(" and ".join(backends), "; ".join(reasons) or None)


def choose(backend: str, q: Tensor, terms: Terms, *, other_width: bool = False) -> Choice:
    """The backend that `auto` stands for, or `backend` itself.

    q: any tensor of the queries' device, dtype and head_dim; of the terms it counts which are set;
    other_width: values have fewer or more features than queries and keys

    UserError if the backend is unknown or cannot compute this.
    """
    if backend == "auto":
        return _best(q, terms, other_width)
    if backend not in BACKENDS:
        names = ", ".join(["auto", *BACKENDS])
        raise UserError(f"attention_backend: {backend!r} is not known; choose from {names}")
    reason = refusal(backend, q, terms, other_width)
    if reason is not None:
        raise UserError(f"attention_backend: {backend} cannot compute this: {reason}; choose auto")
    return Choice(backend)


def _best(q: Tensor, terms: Terms, other_width: bool) -> Choice:
    obstacle = refusal("sdpa", q, terms, other_width)
    if obstacle is not None:
        return Choice("eager", obstacle)
    if terms.scores is not None:
        return Choice("sdpa", REASONS["scores"])
    device = q.device.type.upper()
    if q.device.type not in KERNELS:
        return Choice("sdpa", f"on the {device}")
    named = " and ".join(name for name in ADDED if getattr(terms, name) is not None)
    reason = f"{named or 'plain causal'} on {device}"
    for name in KERNELS[q.device.type] if named else ():
        obstacle = refusal(name, q, terms, other_width)
        fault = FAULTS.get((name, q.device.type))
        if not (obstacle or fault):
            return Choice(name, reason)
        reason += f"; not {name}: {obstacle or fault}"
        if obstacle:
            break
    return Choice("sdpa", reason)


def refusal(backend: str, q: Tensor, terms: Terms, other_width: bool) -> str | None:
    """Why a backend cannot compute this, in one sentence, or None."""
    if backend == "eager":
        return None
    for term in fields(terms):
        is_set = getattr(terms, term.name) is not term.default
        if is_set and term.name not in COMPUTED[backend]:
            return REASONS.get(term.name, f"it does not compute {term.name}")
    content = terms.content
    if backend != "sdpa" and content is not None and content.rank > 1:
        return f"it knows biases by content of rank one, not {content.rank}"
    if backend == "flex" and q.device.type == "cpu" and q.requires_grad and torch.is_grad_enabled():
        return "torch's flex_attention computes no gradients on the CPU"
    if backend != "triton":
        return None
    return "values are not as wide as queries and keys" if other_width else triton_refusal(q, terms)
