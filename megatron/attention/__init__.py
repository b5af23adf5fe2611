"""Causal attention with a bias by head and distance, and the choice of its backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.attention.documents import TOGETHER, by_document, stretches_of
from megatron.attention.eager import ScoreBias, eager
from megatron.attention.first_keys import Pairs
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
    score_bias: tuple[Tensor | None, Tensor] | None = None,
    pairs: Pairs | None = None,
    backend: str = "auto",
    self_check: bool = True,
) -> Tensor:
    """Causal attention with a bias that depends on head and distance.

    q [batch, heads, queries, head_dim]: the queries of the last `queries` keys' positions;
    k [batch, heads, keys, head_dim], v [batch, heads, keys, features], mostly as many;
    bias [heads, >= keys] float32: bias[h, d] is added to q·k/√head_dim of the key d tokens back;
    weight [heads, >= keys]: multiplies q·k/√head_dim before the bias (KERPLE's weight kernels);
    window: a query attends to the last `window` keys up to its own, all others are masked;
    chunk: a query attends to its own chunk of that many keys and to the one before (blockwise
    causal attention, xPos);
    segments [batch, keys] int: a query attends only to keys of its own document;
    index_bias(indices [queries], indices [keys]) -> [heads, queries, keys]: added, for a bias that
    depends on the indices themselves;
    on_scores [batch, heads, queries, keys] -> same: after all biases, where content decides;
    score_bias (u, w): adds u·w by content, u [batch, heads, queries] or None for ones, w
    [batch, heads, keys]; a last dimension of both is a rank above one. w may be float64;
    pairs: counts what was skipped because it has no weight, where the backend skips;
    backend: see `choose`;
    self_check: compare a compiled backend with the definition at its first use of a kind.

    Returns [batch, heads, queries, features] in q's dtype. ValueError where shapes disagree or the
    backend refuses.
    """
    _check_shapes(q, k, v)
    _check_table("bias", bias, k)
    _check_table("weight", weight, k)
    _check_window("window", window)
    _check_window("chunk", chunk)
    _check_segments(segments, k)
    _check_score_bias(score_bias, q, k)

    of_content = ScoreBias.of(score_bias)
    learned = [
        x is not None and x.requires_grad for x in (q, k, v, bias, weight, *(score_bias or ()))
    ]
    needs = Needs(
        q,
        tables=bias is not None or weight is not None,
        masked=window is not None or chunk is not None or segments is not None,
        index_bias=index_bias is not None,
        content=on_scores is not None,
        content_bias=score_bias is not None,
        content_rank=1 if of_content is None else of_content.w.shape[3],
        narrow_values=k.shape != v.shape,
        gradient=torch.is_grad_enabled() and any(learned),
    )
    name = choose(backend, needs).backend
    if segments is not None and _one_by_one(name, k, chunk):
        rows = stretches_of(segments)
        if rows is not None:
            return by_document(
                attention,
                *(q, k, v, bias, rows),
                segments=segments,
                index_bias=index_bias,
                score_bias=score_bias,
                weight=weight,
                window=window,
                pairs=pairs,
                backend=name,
            )
    options: dict[str, Any] = {
        "weight": weight,
        "window": window,
        "chunk": chunk,
        "segments": segments,
    }
    if of_content is not None:
        options["score_bias"] = of_content
    if self_check and name not in TRUSTED and not torch.compiler.is_compiling():
        check(name, BACKENDS[name], q, k, v, bias, **options)
    options["index_bias"] = index_bias
    if on_scores is not None:
        options["on_scores"] = on_scores
    if pairs is not None and name in COUNTING:
        options["pairs"] = pairs
    return BACKENDS[name](q, k, v, bias, **options)


@dataclass(frozen=True)
class Needs:
    """What decides which backends can compute an attention.

    q [batch, heads, queries, head_dim]: any tensor of the queries' device, dtype and head_dim;
    tables: there is a bias or weight by distance;
    masked: a window, chunk or segments mask keys before the query;
    index_bias: a bias depends on indices;
    content: the encoding changes scores by content;
    content_bias: a bias by content of low rank is added; content_rank: that rank, if known;
    narrow_values: values have fewer features than queries and keys;
    gradient: one is wanted
    """

    q: Tensor
    tables: bool = False
    masked: bool = False
    index_bias: bool = False
    content: bool = False
    content_bias: bool = False
    content_rank: int = 1
    narrow_values: bool = False
    gradient: bool = False


class Choice(NamedTuple):
    """A backend and, where `auto` chose it, why."""

    backend: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.backend if self.reason is None else f"{self.backend} (auto: {self.reason})"


def joined(choices: Sequence[Choice]) -> Choice:
    """What several layers chose, as one: their backends, and the reasons of each."""
    distinct = list(dict.fromkeys(choices))
    if len(distinct) == 1:
        return distinct[0]
    backends = list(dict.fromkeys(choice.backend for choice in distinct))
    reasons = [f"{one.backend}, {one.reason}" for one in distinct if one.reason is not None]
    return Choice(" and ".join(backends), "; ".join(reasons) or None)


def choose(backend: str, needs: Needs) -> Choice:
    """The backend that `auto` stands for, or `backend` itself.

    UserError where it is unknown or cannot compute this.
    """
    if backend == "auto":
        return _best(needs)
    if backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise UserError(f"attention_backend: {backend!r} is not known; choose from {known}")
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
    reasons = []
    if needs.index_bias:
        reasons.append("index bias")
    if needs.tables:
        reasons.append("distance table")
    if needs.masked:
        reasons.append("window, chunks or documents")
    if needs.content_bias:
        reasons.append("bias by content")
    if not reasons:
        return Choice("sdpa", "plain causal on CUDA")
    reason = " and ".join(reasons) + " on CUDA"
    for name in ("triton", "flex"):
        obstacle = refusal(name, needs)
        if obstacle is None:
            return Choice(name, reason)
        reason += f"; not {name}: {obstacle}"
    return Choice("sdpa", reason)


def refusal(backend: str, needs: Needs) -> str | None:
    """Why a backend cannot compute this, in one sentence, or None."""
    if backend == "eager":
        return None
    if needs.content:
        return "the encoding looks at content"
    if needs.content_bias and backend == "flex":
        return "a bias depends on content"
    if needs.narrow_values and backend != "sdpa":
        return "queries and keys are wider than values"
    if backend in REFUSALS:
        return REFUSALS[backend](needs)
    return None


def _refusal_of_flex(needs: Needs) -> str | None:
    return flex_refusal(needs.q, index_bias=needs.index_bias, gradient=needs.gradient)


def _refusal_of_triton(needs: Needs) -> str | None:
    rank = needs.content_rank if needs.content_bias else 0
    return triton_refusal(needs.q, index_bias=needs.index_bias, content_rank=rank)


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "eager": eager,
    "sdpa": sdpa,
    "flex": flex,
    "triton": triton_attention,
}
"""What `attention_backend` may name, besides auto."""
REFUSALS: dict[str, Callable[[Needs], str | None]] = {
    "flex": _refusal_of_flex,
    "triton": _refusal_of_triton,
}
"""What some of them cannot compute, besides encodings that look at content."""
COUNTING = {"sdpa"}  # these skip keys, and take `pairs`
TRUSTED = {"eager", "sdpa"}  # these need no compiler of ours


def _one_by_one(name: str, k: Tensor, chunk: int | None) -> bool:
    """Whether documents are computed one by one: on the CPU a call for each costs little.

    Chunks are counted from the window's start. A compiler would begin anew for each batch.
    """
    on_cpu = name == "sdpa" and k.device.type == "cpu"
    is_long = k.shape[2] > TOGETHER
    return on_cpu and is_long and chunk is None and not torch.compiler.is_compiling()


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    same_batch_and_heads = q.shape[:2] == k.shape[:2]
    same_head_dim = q.shape[3] == k.shape[3]
    enough_keys = q.shape[2] <= k.shape[2]
    same_keys = k.shape[:3] == v.shape[:3]
    if same_keys and same_batch_and_heads and same_head_dim and enough_keys:
        return
    raise ValueError(
        f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together"
    )


def _check_table(name: str, table: Tensor | None, k: Tensor) -> None:
    if table is None:
        return
    heads, keys = k.shape[1:3]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < keys:
        raise ValueError(
            f"attention: {name} {list(table.shape)} must be [{heads}, at least {keys}]"
        )


def _check_window(name: str, window: int | None) -> None:
    if window is not None and window < 1:
        raise UserError(f"{name}: {window} must be at least 1, or left out")


def _check_score_bias(
    score_bias: tuple[Tensor | None, Tensor] | None, q: Tensor, k: Tensor
) -> None:
    if score_bias is None:
        return
    u, w = score_bias
    rank = w.shape[3:]
    expected_u = None if u is None else (*q.shape[:3], *rank)
    fits = w.shape == (*k.shape[:3], *rank) and len(rank) <= 1
    if fits and (u is None or u.shape == expected_u):
        return
    shown = "none" if u is None else list(u.shape)
    raise ValueError(
        f"attention: score_bias u {shown} and w {list(w.shape)} must be {list(q.shape[:3])} and"
        f" {list(k.shape[:3])}, with the same last dimension where the rank is above one"
    )


def _check_segments(segments: Tensor | None, k: Tensor) -> None:
    expected = (k.shape[0], k.shape[2])
    if segments is not None and segments.shape != expected:
        raise ValueError(f"attention: segments {list(segments.shape)} must be {list(expected)}")
