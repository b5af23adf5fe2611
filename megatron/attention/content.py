"""A bias by content of low rank: u·w for query and key, in the precision that far sums need.

A sum over all tokens before a key, such as FoX's, reaches 10⁵ in a text of 16384 tokens, where
float32 has two digits after the point. What counts is the difference between neighbours. So w may
be float64, and every block of queries subtracts the w of its last token before it rounds.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreBias:
    """u [batch, heads, queries, rank] or None for ones, w [batch, heads, keys, rank]."""

    u: Tensor | None
    w: Tensor

    @classmethod
    def of(cls, score_bias: tuple[Tensor | None, Tensor] | None) -> "ScoreBias | None":
        """From u and w as `attention` takes them: rank one has no last dimension."""
        if score_bias is None:
            return None
        u, w = score_bias
        if w.dim() == 3:
            w = w[..., None]
            u = None if u is None else u[..., None]
        return cls(u, w)

    def of_queries(self, start: int, end: int) -> "ScoreBias":
        """That of the queries start … end - 1 of a whole text, and the keys up to the last."""
        u = None if self.u is None else self.u[:, :, start:end]
        return ScoreBias(u, self.w[:, :, :end])

    def of_heads(self, heads: slice) -> "ScoreBias":
        """That of some heads."""
        u = None if self.u is None else self.u[:, heads]
        return ScoreBias(u, self.w[:, heads])

    def bias(self, query: Tensor) -> Tensor:
        """u·(w of the key less w of the query's own): [batch, heads, queries, keys].

        query [queries]: where each query's own key is among all keys. What is subtracted is the
        same for all keys of a query, so the softmax ignores it.
        """
        difference = self.w[:, :, None] - self.w[:, :, query, None]
        if self.u is not None:
            difference = self.u[:, :, :, None] * difference
        return difference.sum(-1)  # over the rank

    def relative(
        self, rows: slice, keys: slice, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        """u of these queries, and w of these keys less that of the last: both in `dtype`."""
        w = self.w[:, :, keys]
        near = (w - w[:, :, -1:].detach()).to(dtype)
        u = None if self.u is None else self.u[:, :, rows].to(dtype)
        return u, near


def plus_content(added: Tensor, u: Tensor | None, w: Tensor, room: Tensor | None = None) -> Tensor:
    """added + u·w: [batch, heads, queries, keys], in one pass where the rank is one.

    added [batch or 1, heads, queries, keys];
    room: numbers to be overwritten by the result, which then has no gradient. Memory that the
    system gives anew for each block takes nine times as long to fill.
    """
    out = None
    if room is not None:
        shape = (*w.shape[:2], *added.shape[2:])
        out = room[: math.prod(shape)].view(shape)
    if u is None:
        return torch.add(added, w.sum(-1)[:, :, None], out=out)
    if u.shape[-1] == 1:
        return torch.addcmul(added, u, w.mT, out=out)
    return torch.add(added, u @ w.mT, out=out)
