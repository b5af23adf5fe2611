"""Several encodings at once, such as rotary with a bias by distance."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import BlockScores, Memory, Pair, Position, Shape
from megatron.positions.registry import build, listed, named, register

MOST_PARTS = 8


@register("sum")
class Sum(Position):
    """Several encodings at once: rotations one after the other, biases added, weights multiplied.

    `parts: [rotary, mep_free]` is MEP's bias with rotary, an experiment that MEP's paper leaves
    open (section 6).

    parts: a list of encodings, each a name or {name: {options}}, in this order
    """

    def __init__(self, shape: Shape, *, parts: Sequence[Any]) -> None:
        super().__init__(shape)
        self.parts = nn.ModuleList()
        for part in listed("parts", parts, example="[rotary, mep_free]", most=MOST_PARTS):
            name, options = named("parts", part)
            if name == "sum":
                raise UserError(
                    "parts: sum cannot be inside itself; name the encodings in one list"
                )
            self.parts.append(build(name, shape, **options))
        parts = self._parts
        self.per_layer = any(part.per_layer for part in parts)
        self.by_distance = all(part.by_distance for part in parts)
        self.grouped_queries = all(part.grouped_queries for part in parts)
        self.heads_per_query = max(part.heads_per_query for part in parts)
        self.score_rank = sum(part.score_rank for part in parts if part.has("score_bias"))
        self.score_width = parts[0].score_width
        reasons = [part.crosses_documents for part in parts if part.crosses_documents is not None]
        self.crosses_documents = reasons[0] if reasons else None
        self.in_parts = tuple(
            hook
            for hook in {hook for part in parts for hook in part.in_parts}
            if all(hook in part.in_parts for part in parts if part.has(hook))
        )
        if sum(part.has("block_scores") for part in parts) > 1:
            raise UserError("parts: only one part can give the scores themselves; keep one of them")
        for part in parts[1:]:
            if part.score_width != 1:
                raise UserError(
                    f"parts: {type(part).__name__} makes queries and keys wider; name it first"
                )

    def has(self, hook: str) -> bool:
        return any(part.has(hook) for part in self._parts)

    @property
    def stretch_fault(self) -> str | None:
        turning = [part for part in self._parts if part.rotates] or [self._parts[0]]
        faults = [part.stretch_fault for part in turning]
        return next((fault for fault in faults if fault is not None), None)

    def prepare(self, length: int) -> None:
        for part in self._parts:
            part.prepare(length)

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        for part in self._parts:
            x = part.on_embeddings(x, start)
        return x

    def on_embeddings_by_ids(self, x: Tensor, ids: Tensor, memory: Memory) -> Tensor:
        for part, part_memory in self._with_memory("on_embeddings_by_ids", memory):
            x = part.on_embeddings_by_ids(x, ids, part_memory)
        return x

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        for part in self._parts:
            q, k = part.on_queries_keys(q, k, start)
        return q, k

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        for part in self._parts:
            if part.has("on_queries_keys_at"):
                q, k = part.on_queries_keys_at(q, k, query, key, **place)
        return q, k

    @property
    def movable(self) -> bool:
        return all(part.movable for part in self._parts)

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        for part, part_memory in self._with_memory("on_queries_keys_by_content", memory):
            q, k = part.on_queries_keys_by_content(q, k, x, part_memory)
        return q, k

    def distance_bias(self, length: int) -> Tensor | None:
        return self._joined(operator.add, "distance_bias", length)

    def distance_weight(self, length: int) -> Tensor | None:
        return self._joined(operator.mul, "distance_weight", length)

    def score_scale(self, visible_keys: Tensor) -> Tensor | None:
        return self._joined(operator.mul, "score_scale", visible_keys)

    def _joined(
        self, operation: Callable[[Tensor, Tensor], Tensor], hook: str, argument: int | Tensor
    ) -> Tensor | None:
        """The sum or product of what the parts return that have something of this kind."""
        values = [getattr(part, hook)(argument) for part in self._parts]
        tensors = [value for value in values if value is not None]
        return reduce(operation, tensors) if tensors else None

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        biases = [part.index_bias(queries, keys) for part in self._parts if part.has("index_bias")]
        return sum(biases[1:], biases[0])

    def score_bias(self, x: Tensor, memory: Memory) -> tuple[Tensor | None, Tensor]:
        """Several products are one of higher rank."""
        biases = [
            part.score_bias(x, part_memory)
            for part, part_memory in self._with_memory("score_bias", memory)
        ]
        if len(biases) == 1:
            return biases[0]
        us, ws = [], []
        for u, w in biases:
            w = w if w.dim() == 4 else w[..., None]
            if u is None:
                u = w.new_ones(*w.shape[:2], x.shape[1], w.shape[3])
            us.append(u if u.dim() == 4 else u[..., None])
            ws.append(w)
        return torch.cat(us, dim=-1), torch.cat(ws, dim=-1)

    def block_scores(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> BlockScores:
        [scores] = [
            part.block_scores(q, k, x, part_memory)
            for part, part_memory in self._with_memory("block_scores", memory)
        ]
        return scores

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        for part, part_memory in self._with_memory("on_scores", memory):
            scores = part.on_scores(scores, x, part_memory)
        return scores

    def _with_memory(self, hook: str, memory: Memory) -> Iterator[tuple[Position, Memory]]:
        """Each part that has a hook, and its memory out of that of all, which is kept there."""
        for number, part in enumerate(self._parts):
            if not part.has(hook):
                continue
            prefix = f"part{number}."
            part_memory = {
                name.removeprefix(prefix): tensor
                for name, tensor in memory.items()
                if name.startswith(prefix)
            }
            yield part, part_memory
            memory |= {f"{prefix}{name}": tensor for name, tensor in part_memory.items()}

    @property
    def _parts(self) -> Sequence[Position]:
        return cast(Sequence[Position], self.parts)
