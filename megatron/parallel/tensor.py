"""Tensor parallelism: every rank has a share of each layer's heads and of its MLP's width.

DeepSpeed's AutoTP cuts the matrices of a layer and adds up what the ranks compute with them.
Embeddings, norms and the encoding are whole on every rank.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from megatron.attention import attend
from megatron.attention.terms import Content, Terms
from megatron.parallel.grid import Grid

CUT_BY_OUTPUTS = (".query_key_value.weight", ".query_key_value.bias")
CUT_BY_WIDTH = (".dense_h_to_4h.weight", ".dense_h_to_4h.bias")
CUT_BY_INPUTS = (".attention.dense.weight", ".dense_4h_to_h.weight")
OF_EACH_HEAD = (".query_norm.", ".key_norm.")
"""Ends or parts of names. The last ones are whole on every rank, which uses them for its heads."""


@dataclass(frozen=True)
class Shares:
    """How the parameters of a model are cut.

    gated: whether the MLP has a gate, whose half of `dense_h_to_4h` is cut like the other one
    """

    ranks: int = 1
    gated: bool = False

    def deepspeed_config(self) -> dict[str, Any]:
        """AutoTP's section of the dictionary for `deepspeed.initialize`; {} for one rank."""
        if self.ranks == 1:
            return {}
        halves = {"shape": [2, -1], "partition_dim": 0} if self.gated else {}
        specs = [
            _spec(CUT_BY_OUTPUTS, partition_type="column"),
            _spec(CUT_BY_WIDTH, partition_type="column", **halves),
            _spec(CUT_BY_INPUTS, partition_type="row"),
            _spec(OF_EACH_HEAD, partition_type="skip", grad_allreduce=True),
        ]
        cuts = {"use_default_specs": False, "layer_specs": specs}
        return {"tensor_parallel": {"autotp_size": self.ranks, "partition_config": cuts}}

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """What one rank has of a parameter: its whole where it is not cut."""
        cut = self._cut(name)
        if cut is None:
            return whole
        dimension, blocks = cut
        pieces = whole.unflatten(dimension, (blocks, self.ranks, -1))
        return pieces.select(dimension + 1, rank).flatten(dimension, dimension + 1)

    def joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A parameter from the parts of all ranks."""
        cut = self._cut(name)
        if cut is None:
            return parts[0]
        dimension, blocks = cut
        pieces = [part.unflatten(dimension, (blocks, -1)) for part in parts]
        return torch.stack(pieces, dimension + 1).flatten(dimension, dimension + 2)

    def _cut(self, name: str) -> tuple[int, int] | None:
        """The dimension that is cut, and the blocks of it that are cut alike; None: it is whole."""
        if self.ranks == 1:
            return None
        if name.endswith(CUT_BY_INPUTS):
            return 1, 1
        if name.endswith(CUT_BY_WIDTH):
            return 0, 2 if self.gated else 1
        return (0, 1) if name.endswith(CUT_BY_OUTPUTS) else None


def _spec(names: Sequence[str], **how: Any) -> dict[str, Any]:
    return {"patterns": [f".*{re.escape(name)}" for name in names], **how}


class TensorRanks:
    """The processes that share the heads of every layer, or this one alone.

    model: as DeepSpeed has cut it

    Every rank calls each method at the same time.
    """

    def __init__(self, grid: Grid, shares: Shares, model: Any) -> None:
        self.shares, self.ranks = shares, shares.ranks
        self.rank = grid.rank % shares.ranks
        self.group = None
        if shares.ranks > 1:
            from deepspeed.utils import groups

            self.group = groups.get_tensor_model_parallel_group()
            model.context = self
            for layer in model.layers:
                layer.attention.key_heads //= shares.ranks

    def part(self, length: int) -> slice:
        """The places of this rank's tokens in a text of `length`: all of them."""
        return slice(0, length)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, backend: str, *, self_check: bool
    ) -> Tensor:
        """megatron.attention.attend of this rank's heads.

        q, k, v [batch, own heads, length, features]; terms: of all heads
        Returns [batch, own heads, length, features].
        """
        index_bias, content, of_own_heads = terms.index_bias, terms.content, None
        if index_bias is not None:
            of_own_heads = lambda queries, keys: self._own(index_bias(queries, keys), 0)  # noqa: E731
        if content is not None:
            factors: Any = tuple(self._own(factor, 1) for factor in (content.u, content.w))
            content = Content.of(factors, q.shape[2])
        bias, weight, sink = (self._own(x, 0) for x in (terms.bias, terms.weight, terms.sink))
        tables = {"bias": bias, "weight": weight, "sink": sink}
        terms = replace(terms, index_bias=of_own_heads, content=content, **tables)
        return attend(q, k, v, terms, backend, self_check=self_check)

    def _own(self, whole: Tensor | None, dimension: int) -> Tensor | None:
        """This rank's heads. Their gradients are exchanged: what all ranks have stays the same."""
        if whole is None:
            return None
        from deepspeed.module_inject.layers import ScatterToTensorParallelRegion

        last = whole.movedim(dimension, -1)
        sizes = [last.shape[-1] // self.ranks] * self.ranks
        heads: Any = ScatterToTensorParallelRegion.apply(self.group, last, sizes, self.rank)
        return heads.movedim(-1, dimension)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        return self.shares.part(name, whole, self.rank)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A parameter from the parts of all ranks."""
        parts = [part.contiguous()]
        if self.ranks > 1:
            parts = [torch.empty_like(parts[0]) for _ in range(self.ranks)]
            torch.distributed.all_gather(parts, part.contiguous(), group=self.group)
        return self.shares.joined(name, parts)

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The norm of the whole gradient, where ZeRO has not divided it."""
        if self.ranks == 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            return nn.utils.get_total_norm(gradients)
        from deepspeed.runtime.utils import clip_grad_norm_
        from deepspeed.utils import groups

        return clip_grad_norm_(model.parameters(), math.inf, mpu=groups)
