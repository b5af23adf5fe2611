"""Context parallelism: several processes share a text, and each has a part of its tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.attention import attend
from megatron.attention.terms import Content, Terms
from megatron.parallel.grid import Grid


class Context:
    """The processes that share a text, and how they exchange attention.

    Rank c of N has the tokens c·length/N … (c + 1)·length/N - 1. With `a2a` (DeepSpeed-Ulysses,
    arXiv 2309.14509) each rank attends to the whole text with its share of the heads. With
    `all_gather` it attends with its own queries, and all heads, to the keys up to them.

    Every rank calls `attend` at the same time.
    """

    def __init__(self, group: ProcessGroup, comm_type: str) -> None:
        self.group = group
        self.rank, self.ranks = group.rank(), group.size()
        self.by_heads: Callable[..., Tensor] | None = None
        if comm_type == "a2a":
            from deepspeed.sequence.layer import DistributedAttention

            inputs: tuple[Any, ...] = (attention_of_length_first, group)
            self.by_heads = DistributedAttention(*inputs, scatter_idx=2, gather_idx=1)

    def part(self, length: int) -> slice:
        """This rank's slice of `length` tokens or heads, which the ranks divide."""
        assert length % self.ranks == 0
        size = length // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, backend: str, *, self_check: bool
    ) -> Tensor:
        """megatron.attention.attend over the whole text, for the queries of this rank.

        q, k, v [batch, heads, own tokens, features]; terms: for the whole text, except the content,
        which has this rank's tokens, with w a sum over the tokens up to each key
        (`Position.in_parts`)

        Returns [batch, heads, own tokens, features].
        """
        heads, length = q.shape[1], q.shape[2] * self.ranks
        if self.by_heads is not None:
            own_heads, visible = self.part(heads), slice(0, length)
        else:
            own_heads, visible = slice(0, heads), slice(0, self.part(length).stop)

        content, index_bias = terms.content, terms.index_bias
        if content is not None:
            u, w = content.u, content.w
            totals = self.gather(w[:, :, -1:])  # [batch, heads, ranks, rank]
            w = w + totals[:, :, : self.rank].sum(dim=2, keepdim=True)
            w = self.gather(w)[:, own_heads, visible]
            if u is not None and self.by_heads is not None:
                u = self.gather(u)[:, own_heads]
            content = Content.of((u, w), length if self.by_heads is not None else q.shape[2])
        head_bias = None
        if index_bias is not None:
            head_bias = lambda queries, keys: index_bias(queries, keys)[own_heads]  # noqa: E731
        bias, weight, sink = (
            None if x is None else x[own_heads] for x in (terms.bias, terms.weight, terms.sink)
        )
        terms = replace(
            terms,
            bias=bias,
            weight=weight,
            sink=sink,
            segments=None if terms.segments is None else terms.segments[:, visible],
            index_bias=head_bias,
            content=content,
        )
        if self.by_heads is None:
            k, v = self.gather(k)[:, :, visible], self.gather(v)[:, :, visible]
            return attend(q, k, v, terms, backend, self_check=self_check)
        options = {"terms": terms, "backend": backend, "self_check": self_check}
        length_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        return self.by_heads(*length_first, batch_dim_idx=0, **options).transpose(1, 2)

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks: [batch, heads, own tokens, …] -> [batch, heads, length, …]."""
        return cast(Tensor, Gather.apply(part, self.group))


def attention_of_length_first(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """attend for [batch, length, heads, features], as in DeepSpeed's layer."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attend(q, k, v, **options).transpose(1, 2)


class Gather(torch.autograd.Function):
    """Join the parts of all ranks along dimension 2. The gradient of a part is the sum over ranks,
    because the loss is (up to a factor) the sum of the ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in gradients[0].chunk(ctx.group.size(), dim=2)]
        gradient = torch.empty_like(parts[0])
        torch.distributed.reduce_scatter(gradient, parts, group=ctx.group)
        return gradient, None


def context_of(grid: Grid, comm_type: str) -> Context | None:
    """The context of this process, or None if each process has its own texts.

    Every rank calls this, because a process group is created by all of them.
    """
    size = grid.context_ranks
    if size == 1:
        return None
    own_group = None
    for first in range(0, grid.ranks, size):
        group = torch.distributed.new_group(range(first, first + size))
        if first <= grid.rank < first + size:
            own_group = group
    return Context(cast(ProcessGroup, own_group), comm_type)
