"""Causal attention with a bias by head and distance, and the choice of its backend."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.attention.documents import (
    TOGETHER,
    by_chunk,
    by_document,
    is_one_document,
    lengths_of_parts,
)
from megatron.attention.eager import eager
from megatron.attention.flex import flex as flex
from megatron.attention.sdpa import sdpa
from megatron.attention.self_check import check
from megatron.attention.terms import BlockScores, Content, Terms, check_lengths, with_sink
from megatron.attention.triton_kernel import refusal as triton_refusal
from megatron.attention.triton_kernel import triton_attention
from megatron.errors import UserError

Backend = Callable[[Tensor, Tensor, Tensor, Terms], tuple[Tensor, Tensor | None]]
"""From q, k, v and the terms: the output, and its lse where `needs_lse` asks for it."""
BACKENDS: dict[str, Backend] = {
    "eager": eager,
    "sdpa": sdpa,
    "triton": triton_attention,
}
"""Values of `attention_backend`, besides auto."""
BY_TRITON = {"bias", "weight", "window", "chunk", "segments", "content", "sink", "needs_lse"}
COMPUTED = {"sdpa": BY_TRITON | {"index_bias", "scores"}, "triton": BY_TRITON}
"""The terms that a backend computes; eager, the definition, computes all. Others are refused."""
REASONS = {
    "on_scores": "the encoding looks at content",
    "scores": "the encoding gives scores by content",
    "index_bias": "it reads biases from a table by distance, not by indices",
}
"""Why a backend does not compute a term."""
TRUSTED = {"eager", "sdpa"}  # these need no compiler of ours


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
    backend refuses.
    """
    heads, keys = k.shape[1:3]
    same_heads = q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not (same_heads and q.shape[2] <= keys and k.shape[:3] == v.shape[:3]):
        raise ValueError(
            f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit"
            " together"
        )
    for table_name, table in {"bias": bias, "weight": weight}.items():
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < keys:
            raise ValueError(
                f"attention: {table_name} {list(table.shape)} must be [{heads}, at least {keys}]"
            )
    if sink is not None and list(sink.shape) != [heads]:
        raise ValueError(f"attention: sink {list(sink.shape)} must be [{heads}]")
    expected = [k.shape[0], keys]
    if segments is not None and list(segments.shape) != expected:
        raise ValueError(f"attention: segments {list(segments.shape)} must be {expected}")
    if score_bias is not None:
        u, w = score_bias
        rank = w.shape[3:]
        u_fits = u is None or u.shape == (*q.shape[:3], *rank)
        if not u_fits or w.shape != (*k.shape[:3], *rank) or len(rank) > 1:
            shown = "none" if u is None else list(u.shape)
            raise ValueError(
                f"attention: score_bias u {shown} and w {list(w.shape)} must be"
                f" {list(q.shape[:3])} and {list(k.shape[:3])}, with the same last dimension where"
                " the rank is above one"
            )
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, backend: str = "auto", *, self_check: bool = True
) -> Tensor:
    """`attention`, with its options as a record."""
    terms = replace(terms, needs_lse=terms.sink is not None)
    name = choose(backend, q, terms, other_width=k.shape != v.shape).backend
    compiling = torch.compiler.is_compiling()
    in_parts = name != "eager" and terms.scores is None  # a part of given scores cannot be asked

    def attend_to_part(q: Tensor, k: Tensor, v: Tensor, part: Terms) -> Tensor:
        return attend(q, k, v, part, name, self_check=self_check)

    if terms.chunk is not None and in_parts:
        if 2 * terms.chunk < k.shape[2]:
            return by_chunk(attend_to_part, q, k, v, terms)
        terms = replace(terms, chunk=None)  # it masks nothing
    # On the CPU a call for each document costs little; a compiler would begin anew for each batch.
    one_by_one = in_parts and name == "sdpa" and k.device.type == "cpu" and not compiling
    if terms.segments is not None and one_by_one and k.shape[2] > TOGETHER:
        if is_one_document(terms.segments):
            terms = replace(terms, segments=None)
        else:
            rows = lengths_of_parts(terms.segments)
            if rows is not None:
                return by_document(attend_to_part, q, k, v, terms, rows)
    if self_check and name not in TRUSTED and not compiling:
        check(name, BACKENDS[name], q, k, v, terms=terms)
    out, lse = BACKENDS[name](q, k, v, terms)
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
    if q.device.type != "cuda":
        return Choice("sdpa", f"on the {q.device.type.upper()}")
    named = {
        "index bias": (terms.index_bias,),
        "distance table": (terms.bias, terms.weight),
        "window, chunks or documents": (terms.window, terms.chunk, terms.segments),
        "bias by content": (terms.content,),
    }
    reasons = [name for name, values in named.items() if any(x is not None for x in values)]
    if not reasons:
        return Choice("sdpa", "plain causal on CUDA")
    reason = " and ".join(reasons) + " on CUDA"
    obstacle = refusal("triton", q, terms, other_width)
    if obstacle is None:
        return Choice("triton", reason)
    return Choice("sdpa", f"{reason}; not triton: {obstacle}")


def refusal(backend: str, q: Tensor, terms: Terms, other_width: bool) -> str | None:
    """Why a backend cannot compute this, in one sentence, or None."""
    if backend == "eager":
        return None
    for term in fields(terms):
        is_set = getattr(terms, term.name) is not term.default
        if is_set and term.name not in COMPUTED[backend]:
            return REASONS.get(term.name, f"it does not compute {term.name}")
    if backend != "triton":
        return None
    return "values are not as wide as queries and keys" if other_width else triton_refusal(q, terms)
