"""Places of documents in a batch of windows, by the token that ends each of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a batch; a token of its own ends each, and belongs to it (Megatron-LM).

    ends [batch, keys] bool: whether a token is the last one of its document. Tokens of a cached
        text come first
    numbers [batch, keys] int64: the number of each token's document in its row
    new: which of the tokens are computed: the last ones, or a part of them
    restart: whether positions begin again at each document
    """

    ends: Tensor
    numbers: Tensor
    new: slice
    restart: bool = False

    @classmethod
    def of(
        cls, ids: Tensor, end: int, *, earlier: Tensor | None = None, restart: bool = False
    ) -> "Documents":
        """Those of ids [batch, length]; earlier [batch, keys]: `ends` of the text before them."""
        ends = ids == end
        if earlier is not None:
            ends = torch.cat([earlier, ends], dim=1)
        counts = ends.long()
        numbers = counts.cumsum(dim=1) - counts
        new = slice(ends.shape[1] - ids.shape[1], ends.shape[1])
        return cls(ends, numbers, new, restart)

    @cached_property
    def places(self) -> Tensor:
        """The place of each new token in its document, from 0: [batch, length] int64."""
        index = torch.arange(self.ends.shape[1], device=self.ends.device)
        after_an_end = torch.zeros_like(self.ends)
        after_an_end[:, 1:] = self.ends[:, :-1]
        first = torch.where(after_an_end, index, 0).cummax(dim=1).values
        return (index - first)[:, self.new]


def by_document(
    hook: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], documents: Documents
) -> tuple[Tensor, ...]:
    """`hook(*tensors, start)` for each document by itself, start counted from its first token.

    tensors [batch, …, length, features] each -> same
    """

    def act() -> tuple[Tensor, ...]:
        rows = []
        numbers = documents.numbers[:, documents.new]
        for row, place in enumerate(documents.places[:, 0].tolist()):
            lengths = numbers[row].unique_consecutive(return_counts=True)[1].tolist()
            pieces = []
            for parts in zip(
                *(x[row : row + 1].split(lengths, dim=-2) for x in tensors), strict=True
            ):
                pieces.append(hook(*parts, 0 if pieces else place))
            rows.append(_joined(pieces, dim=-2))
        return _joined(rows, dim=0)

    # Compiled, it would be compiled again for each batch.
    return cast(Any, torch.compiler.disable)(act)()


def _joined(parts: list[tuple[Tensor, ...]], dim: int) -> tuple[Tensor, ...]:
    """Each tensor of all parts in one."""
    return tuple(torch.cat(several, dim=dim) for several in zip(*parts, strict=True))
