"""Attention in parts of a text: what a mask would leave out is not computed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron.attention.terms import Terms

TOGETHER = 256
"""Tokens up to which neighbouring documents are computed together, under a mask."""
Attend = Callable[[Tensor, Tensor, Tensor, Terms], Tensor]


def by_chunk(attend: Attend, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """`attend` on the queries of each chunk, and on its keys and those of the chunk before."""
    assert terms.chunk is not None
    queries, keys, chunk = q.shape[2], k.shape[2], terms.chunk
    before = keys - queries  # keys without a query, of a cached text
    outputs = []
    for start in range(before // chunk * chunk, keys, chunk):
        rows = slice(max(0, start - before), start + chunk - before)
        columns = slice(max(0, start - chunk), start + chunk)
        part = replace(terms.part(rows, columns), chunk=None)
        outputs.append(attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], part))
    return torch.cat(outputs, dim=2)


def is_one_document(segments: Tensor) -> bool:
    """Whether each row is one document."""
    return bool((segments == segments[:, :1]).all())


def lengths_of_parts(segments: Tensor) -> list[list[int]] | None:
    """Lengths of each row's documents, of short neighbours together.

    segments [batch, keys] int; None if a document comes back after another one
    """
    rows = []
    for row in segments:
        documents, sizes = row.unique_consecutive(return_counts=True)
        if len(documents.unique()) < len(documents):
            return None
        lengths = [0]
        for size in sizes.tolist():
            if lengths[-1] + size <= TOGETHER:
                lengths[-1] += size
            else:
                lengths.append(size)
        rows.append(lengths)
    return rows


def by_document(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, terms: Terms, rows: list[list[int]]
) -> Tensor:
    """`attend` on each part of a text by itself.

    rows: of `lengths_of_parts(terms.segments)`
    """
    before = k.shape[2] - q.shape[2]  # keys without a query, of a cached text
    tensors = (q, k, v, *terms.tensors[2:])
    outputs = []
    for number, key_counts in enumerate(rows):
        text = slice(number, number + 1)
        ends = list(accumulate(key_counts))
        query_counts = [
            min(count, max(0, end - before)) for count, end in zip(key_counts, ends, strict=True)
        ]
        # Parts of a split: their gradients are joined once, those of slices would be added.
        parts: list[Any] = []
        per_query = (True, False, False, True, False, True)  # q, k, v, u, w, own_w
        for x, is_per_query in zip(tensors, per_query, strict=True):
            counts = query_counts if is_per_query else key_counts
            parts.append([None] * len(ends) if x is None else x[text].split(counts, dim=2))
        outputs_of_row = []
        for end, count, part_q, part_k, part_v, *content in zip(
            ends, key_counts, *parts, strict=True
        ):
            if not part_q.shape[2]:
                continue
            part = replace(terms, content=None).part(slice(None), slice(end - count, end), text)
            part = part.with_tensors(terms.bias, terms.weight, *content)
            assert part.segments is not None
            if is_one_document(part.segments):
                part = replace(part, segments=None)
            outputs_of_row.append(attend(part_q, part_k, part_v, part))
        outputs.append(torch.cat(outputs_of_row, dim=2))
    return torch.cat(outputs)
