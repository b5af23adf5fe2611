"""Attention document by document: what a mask would leave out is not computed."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOGETHER = 256
"""Tokens up to which neighbouring documents are computed together, under a mask."""
IndexBias = Callable[[Tensor, Tensor], Tensor]


class Stretch(NamedTuple):
    """Keys start … end - 1 of a row: one document, or several short ones."""

    start: int
    end: int
    is_one: bool

    @property
    def length(self) -> int:
        return self.end - self.start


def stretches_of(segments: Tensor) -> list[list[Stretch]] | None:
    """Each row cut where documents begin, or None if a document comes back after another one.

    segments [batch, keys] int
    """
    rows = []
    for row in segments:
        documents, sizes = row.unique_consecutive(return_counts=True)
        if len(documents.unique()) < len(documents):
            return None
        rows.append(list(_joined(sizes.tolist())))
    return rows


def _joined(sizes: list[int]) -> Iterator[Stretch]:
    """Documents of these sizes; neighbours are joined while together they are short."""
    start = end = count = 0
    for size in sizes:
        if count and end + size - start > TOGETHER:
            yield Stretch(start, end, count == 1)
            start, count = end, 0
        end += size
        count += 1
    yield Stretch(start, end, count == 1)


def by_document(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    rows: list[list[Stretch]],
    *,
    segments: Tensor,
    index_bias: IndexBias | None,
    score_bias: tuple[Tensor | None, Tensor] | None,
    **options: Any,
) -> Tensor:
    """`attend` on each stretch by itself; see megatron.attention.attention for the arguments.

    rows: of `stretches_of(segments)`
    """
    if all(len(stretches) == 1 and stretches[0].is_one for stretches in rows):
        more = {"index_bias": index_bias, "score_bias": score_bias, **options}
        return attend(q, k, v, bias, segments=None, **more)
    keys = k.shape[2]
    before = keys - q.shape[2]  # keys without a query, of a cached text
    u, w = (None, None) if score_bias is None else score_bias
    outputs = []
    for number, stretches in enumerate(rows):
        row = slice(number, number + 1)
        of_keys = [one.length for one in stretches]
        of_queries = [max(0, one.end - max(one.start, before)) for one in stretches]
        # Parts of a split: their gradients are joined once, those of slices would be added.
        parts = zip(
            stretches,
            q[row].split(of_queries, dim=2),
            k[row].split(of_keys, dim=2),
            v[row].split(of_keys, dim=2),
            segments[row].split(of_keys, dim=1),
            _parts(None if u is None else u[row], of_queries),
            _parts(None if w is None else w[row], of_keys),
            strict=True,
        )
        outputs_of_row = []
        for one, queries, its_keys, values, numbers, its_u, its_w in parts:
            if not queries.shape[2]:
                continue
            out = attend(
                queries,
                its_keys,
                values,
                bias,
                segments=None if one.is_one else numbers,
                index_bias=_moved(index_bias, one.start),
                score_bias=None if its_w is None else (its_u, its_w),
                **options,
            )
            outputs_of_row.append(out)
        outputs.append(torch.cat(outputs_of_row, dim=2))
    return torch.cat(outputs)


def _parts(x: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
    """[1, heads, length or 1, …] along its length; the same one for all where that is 1."""
    if x is None or x.shape[2] < sum(sizes):
        return [x] * len(sizes)
    return list(x.split(sizes, dim=2))


def _moved(index_bias: IndexBias | None, start: int) -> IndexBias | None:
    """The bias by indices of the whole text, for indices that begin at `start`."""
    if index_bias is None:
        return None
    return lambda queries, keys: index_bias(queries + start, keys + start)
