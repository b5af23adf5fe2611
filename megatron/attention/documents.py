"""Attention document by document: what a mask would leave out is not computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.attention.terms import Content, Terms

TOGETHER = 256
"""Tokens up to which neighbouring documents are computed together, under a mask."""


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
    attend: Callable[[Tensor, Tensor, Tensor, Terms], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    terms: Terms,
    rows: list[list[Stretch]],
) -> Tensor:
    """`attend` on each stretch of q, k and v by itself.

    rows: of `stretches_of(terms.segments)`
    """
    q, k, _ = tensors
    if all(len(stretches) == 1 and stretches[0].is_one for stretches in rows):
        return attend(*tensors, replace(terms, segments=None))
    before = k.shape[2] - q.shape[2]  # keys without a query, of a cached text
    outputs = []
    for number, stretches in enumerate(rows):
        text = slice(number, number + 1)
        key_counts = [stretch.length for stretch in stretches]
        query_counts = [max(0, piece.end - max(piece.start, before)) for piece in stretches]
        counts = (query_counts, key_counts, key_counts)
        # Parts of a split: their gradients are joined once, those of slices would be added.
        parts = [x[text].split(sizes, dim=2) for x, sizes in zip(tensors, counts, strict=True)]
        content = _content_parts(terms.content, text, query_counts, key_counts)
        outputs_of_row = []
        for piece, content_of_piece, *piece_tensors in zip(stretches, content, *parts, strict=True):
            if not piece_tensors[0].shape[2]:
                continue
            own_terms = replace(terms, content=None).part(
                slice(None), slice(piece.start, piece.end), text
            )
            segments = None if piece.is_one else own_terms.segments
            own_terms = replace(own_terms, content=content_of_piece, segments=segments)
            outputs_of_row.append(
                attend(piece_tensors[0], piece_tensors[1], piece_tensors[2], own_terms)
            )
        outputs.append(torch.cat(outputs_of_row, dim=2))
    return torch.cat(outputs)


def _content_parts(
    content: Content | None, text: slice, queries: list[int], keys: list[int]
) -> Sequence[Content | None]:
    """The content of the stretches of a text, whose queries and keys are so many."""
    if content is None:
        return [None] * len(keys)
    u = [None] * len(keys) if content.u is None else content.u[text].split(queries, dim=2)
    split = u, content.w[text].split(keys, dim=2), content.own_w[text].split(queries, dim=2)
    return [Content(*factors) for factors in zip(*split, strict=True)]
