"""What attention in blocks is computed from, and what follows from it alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.attention.content import ScoreBias
from megatron.attention.first_keys import FirstKeys, first_keys
from megatron.attention.scope import Scope

EXACT_SPREAD = 256
"""Up to here, float32 holds a difference with an error of at most 8e-6."""
LEAST_ROWS = 16


@dataclass(frozen=True)
class Inputs:
    """What `megatron.attention.attention` takes; scope: its lengths, window and chunk."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None
    segments: Tensor | None
    scope: Scope
    index_bias: Callable[[Tensor, Tensor], Tensor] | None = None
    score_bias: ScoreBias | None = None

    @property
    def on_cpu(self) -> bool:
        return self.q.device.type == "cpu"

    @property
    def in_view(self) -> bool:
        """Whether what is added to the scores of a block is a view of a table."""
        options = (self.weight, self.segments, self.index_bias, self.score_bias)
        return all(option is None for option in options)

    @property
    def in_groups_of_heads(self) -> bool:
        """Whether some heads may be computed before others."""
        return self.on_cpu and self.index_bias is None

    @property
    def content_alone(self) -> bool:
        """Whether a bias by content is all that is added under the causal mask.

        In half precision only numbers for each key are: as a feature of a query, u would be
        rounded.
        """
        if self.score_bias is None or not self.on_cpu:
            return False
        scope = self.scope
        options = (self.bias, self.weight, self.segments, self.index_bias)
        if any(option is not None for option in (*options, scope.window, scope.chunk)):
            return False
        return self.score_bias.u is None or self.q.dtype in (torch.float32, torch.float64)

    @property
    def differs_by_head(self) -> bool:
        """Whether numbers are computed for each score of each head."""
        if self.segments is not None and self.bias is not None:
            return True
        return self.weight is not None or self.score_bias is not None

    def exact_rows(self, most: int) -> int:
        """How many queries a block may have: at most `most`.

        In a block, float32 holds the differences of u·w from that of its last token. Where they
        are large, it loses digits, unless the block is small.
        """
        if self.score_bias is None:
            return most
        rows = most
        while rows > LEAST_ROWS and not self._spread(rows) <= EXACT_SPREAD:
            rows //= 2
        return rows

    def _spread(self, rows: int) -> float:
        """By how much u·w differs, at most, between the own keys of a block of so many queries."""
        assert self.score_bias is not None
        u, w = self.score_bias.u, self.score_bias.w[:, :, self.scope.before :]
        blocks = w.split(rows, dim=2)
        spread = max(float((of_block.amax(2) - of_block.amin(2)).max()) for of_block in blocks)
        return spread if u is None else spread * float(u.abs().max())

    def first_keys(self) -> FirstKeys | None:
        """What `in_blocks` need not look at."""
        if self.weight is not None or self.index_bias is not None:
            return None
        return first_keys(self.q, self.k, self.bias, self.score_bias, self.segments, self.scope)
