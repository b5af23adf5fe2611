"""Randomized positions: training uses ordered positions from a wider range (arXiv 2305.16843)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import EXACT, Around, Pair, Shape
from megatron.positions.registry import build_inside, register, whole

TRAITS = ("per_layer", "by_distance", "grouped_queries", "heads_per_query")
"""Attributes that it has from the encoding inside."""


@register("randomized")
class Randomized(Around):
    """Another encoding, trained at random positions: sorted distinct ones from 0 … range - 1.

    Section 3.1 of the paper. Each forward pass draws once, or once for each layer if layers have
    their own encodings. In evaluation it is simply the encoding `of`.

    of: name of the encoding
    args: options of that encoding
    range: the paper's L, by default 4 · seq_length
    """

    def __init__(
        self,
        shape: Shape,
        *,
        of: str = "rotary",
        args: Mapping[str, Any] | None = None,
        range: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.range = 4 * shape.train_length
        if range is not None:
            self.range = whole("range", range, least=shape.train_length, most=EXACT)
        if of == "randomized":
            raise UserError("of: randomized cannot be inside itself; name another encoding")
        inner = build_inside(shape, of, args, example="rotary", max_positions=self.range)
        self.inner, options = inner
        whole("max_positions", options.get("max_positions", EXACT), least=self.range, most=EXACT)
        for trait in TRAITS:
            setattr(self, trait, getattr(self.inner, trait))

    def has(self, hook: str) -> bool:
        """Drawn positions turn a table by distance into a bias by index."""
        if hook == "prepare":
            return True
        if hook == "index_bias" and self.drawn is not None:
            has_table = self.inner.distance_bias(1) is not None
            return has_table or self.inner.has(hook)
        return self.inner.has(hook)

    def prepare(self, length: int) -> None:
        """In training, draw positions from torch's generator, which the trainer seeds each step."""
        self.drawn = None
        if self.training:
            if length > self.range:
                raise UserError(
                    f"pos_emb_args: randomized: range: {self.range} holds no {length} positions;"
                    " raise it"
                )
            positions = torch.randperm(self.range, device=self.origin.device)
            self.drawn = positions[:length].sort().values
        self.inner.drawn = self.drawn

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        return self.inner.on_queries_keys_at(q, k, query, key, **place)

    @property
    def movable(self) -> bool:
        return self.inner.movable

    @property
    def stretch_fault(self) -> str | None:
        return self.inner.stretch_fault

    def distance_bias(self, length: int) -> Tensor | None:
        if self.drawn is not None:
            return None  # index_bias adds it
        return self.inner.distance_bias(length)

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias of the positions drawn for these indices, or in evaluation of these indices."""
        if self.drawn is None:
            return self.inner.index_bias(queries, keys)
        return self.inner.bias_between(self.drawn[queries], self.drawn[keys], self.range)
