"""Blocks of scored targets: the same pieces of text at every length of the windows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.evaluation.protocols import Windows
from megatron.results.row import BLOCK


@dataclass(frozen=True)
class Blocks:
    """How the scored targets of some windows are cut into blocks of 512.

    A block may span several short windows, and a long window holds several blocks: a part is what
    one window holds of one block.

    starts: [windows] of [parts], the position in the window at which each part begins
    numbers: [windows] of [parts], the number of the block that each part belongs to
    tokens: [blocks], the scored targets of each block: 512, or fewer at the end of a stretch
    """

    starts: Sequence[Sequence[int]]
    numbers: Sequence[Sequence[int]]
    tokens: Sequence[int]

    def means(self, sums: Iterable[Sequence[float]]) -> np.ndarray:
        """The mean loss of each block: [blocks] float64.

        sums: [windows] of [parts], the summed loss of each part
        """
        totals = np.zeros(len(self.tokens))
        for numbers, parts in zip(self.numbers, sums, strict=True):
            for number, loss in zip(numbers, parts, strict=True):
                totals[number] += loss
        return totals / np.asarray(self.tokens)


def blocks_of(windows: Windows) -> Blocks:
    """Cut the scored targets into blocks, in text order; a new stretch begins a new block."""
    starts: list[list[int]] = []
    numbers: list[list[int]] = []
    tokens: list[int] = []
    stretches = windows.stretches or [0] * len(windows.ids)
    last_stretch = None
    for first, stretch in zip(windows.first_scored, stretches, strict=True):
        if stretch != last_stretch:
            tokens.append(0)
            last_stretch = stretch
        starts.append([])
        numbers.append([])
        position = first
        while position < windows.length:
            if tokens[-1] == BLOCK:
                tokens.append(0)
            starts[-1].append(position)
            numbers[-1].append(len(tokens) - 1)
            part = min(BLOCK - tokens[-1], windows.length - position)
            tokens[-1] += part
            position += part
    return Blocks(starts, numbers, tokens)
