"""Randomized positions: in training, another encoding sees ordered positions from a wider range (arXiv 2305.16843)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Position, Shape
from megatron.positions.registry import build, encoding_called, options_of, positive, register


@register("randomized")
class Randomized(Position):
    """In training, the encoding `of` at sorted distinct positions drawn from 0 … range - 1 (section 3.1); one draw for
    each forward pass and, where layers have encodings of their own, layer. In evaluation, that encoding itself.

    of: name of the encoding; args: its options; range: the paper's L, by default 4 · seq_length
    """

    inner: Position

    def __init__(
        self,
        shape: Shape,
        *,
        of: str = "rotary",
        args: Mapping[str, Any] | None = None,
        range: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.range = 4 * shape.train_length if range is None else int(positive("range", range))
        if self.range < shape.train_length:
            raise UserError(f"range: {range} is less than the training length {shape.train_length}")
        self.inner = _inner(shape, of, args, self.range)
        self.per_layer = self.inner.per_layer

    def has(self, hook: str) -> bool:
        tables = (
            hook == "index_bias"
            and self.drawn is not None
            and self.inner.distance_bias(1) is not None
        )
        return tables or self.inner.has(hook)

    def prepare(self, length: int) -> None:
        """Draw for this forward pass from torch's generator, which the trainer seeds at every step; or forget."""
        self.drawn = None
        if self.training:
            if length > self.range:
                raise UserError(
                    f"pos_emb_args: randomized: range: {self.range} holds no {length} positions; raise it"
                )
            self.drawn = (
                torch.randperm(self.range, device=self.origin.device)[:length].sort().values
            )
        self.inner.drawn = self.drawn

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        return self.inner.on_embeddings(x, start)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        return self.inner.on_queries_keys(q, k, start)

    def distance_bias(self, length: int) -> Tensor | None:
        return (
            self.inner.distance_bias(length) if self.drawn is None else None
        )  # else it is in index_bias

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[queries], [keys] int64 -> [heads, queries, keys]: the bias of the positions drawn for these indices."""
        if self.drawn is not None:
            queries, keys = self.drawn[queries], self.drawn[keys]
        bias = (
            self.inner.index_bias(queries, keys)
            if self.inner.has("index_bias")
            else torch.zeros_like(self.origin)
        )
        if self.drawn is not None:
            table = self.inner.distance_bias(self.range)
            bias = (
                bias if table is None else bias + table[:, (queries[:, None] - keys).clamp(min=0)]
            )
        return bias


def _inner(shape: Shape, of: str, args: Mapping[str, Any] | None, positions: int) -> Position:
    """The encoding that is to see drawn positions; UserError where it would not notice them."""
    if not isinstance(of, str):
        raise UserError(f"of: {of!r} is not the name of an encoding; write of: rotary")
    if args is not None and not isinstance(args, Mapping):
        raise UserError(f"args: {args!r} are not options; write args: {{option: value}}")
    if issubclass(encoding_called(of), Randomized):
        raise UserError(
            "of: randomized cannot be inside itself; name the encoding that is to see drawn positions"
        )
    options = dict(args or {})
    if "max_positions" in options_of(of):
        options.setdefault("max_positions", positions)
    inner = build(of, shape, **options)
    if options.get("max_positions", positions) < positions:
        raise UserError(
            f"max_positions: {options['max_positions']} is less than range: {positions}; raise it"
        )
    if inner.has("on_scores"):
        raise UserError(
            f"of: {of} looks at content, not at positions, so there is nothing to randomize"
        )
    if inner.distance_weight(1) is not None:
        raise UserError(
            f"of: {of} multiplies the scores by distance, which cannot be randomized; choose a bias"
        )
    return inner
