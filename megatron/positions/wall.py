"""Wall attention: a forget gate at every token for each feature (Tilde Research, 2026)."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import BlockScores, Memory, Position, Shape, running_sum
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register

SPAN = 256  # tokens whose keys fade to one place: attention asks for so many queries


class Span(NamedTuple):
    """Tensors of neighbouring tokens: [batch, heads, tokens, head_dim], but for the last.

    log_f: of the gates; faded: keys as the last token of the span leaves them; total [batch, heads,
    1, head_dim]: the sum of log_f
    """

    q: Tensor
    k: Tensor
    log_f: Tensor
    faded: Tensor
    total: Tensor


@register("wall")
class Wall(Position):
    """Σ_c q_ic k_jc exp(Σ log f_lc) / √head_dim, l = j+1 … i the tokens between key j and query i.

    f = sigmoid(W x + b) has a number for each feature c of each head, in every layer, so that some
    features forget faster than others (Tilde Research, 2026, as in flash-linear-attention's
    `wall_attn`). b begins large, so f near 1 and the scores near q·k. For the sink of the released
    code set `softmax_type`. Gates are multiplied from the key to a token between, and from there to
    the query, so that no factor exceeds 1. Every new token of a cached text changes all cached
    keys: the cache keeps them twice.

    gate_bias: first value of b
    init_std: standard deviation of the first values of W
    scalar_gate: whether each head also has the gate of `fox`, a bias of the scores, with these
        first values
    """

    per_layer = True
    grouped_queries = False
    sums_over_tokens = True

    def __init__(
        self,
        shape: Shape,
        *,
        gate_bias: float = 8.0,
        init_std: float = 0.02,
        scalar_gate: bool = False,
    ) -> None:
        super().__init__(shape)
        std = positive("init_std", init_std, most=10.0)
        start = positive("gate_bias", gate_bias, most=100.0)
        features = shape.heads * shape.head_dim
        self.weight = nn.Parameter(torch.empty(features, shape.hidden).normal_(0.0, std))
        self.bias = nn.Parameter(torch.full((features,), start))
        self.scalar_weight = self.scalar_bias = None
        if scalar_gate:
            weight = torch.empty(shape.heads, shape.hidden).normal_(0.0, std)
            self.scalar_weight = nn.Parameter(weight)
            self.scalar_bias = nn.Parameter(torch.full((shape.heads,), start))

    def has(self, hook: str) -> bool:
        return super().has(hook) and (hook != "score_bias" or self.scalar_weight is not None)

    def score_bias(self, x: Tensor, memory: Memory) -> tuple[None, Tensor]:
        """Minus the sum of the scalar gates' log f up to each key: [batch, heads, keys]."""
        with without_autocast(x):
            return None, -running_sum(self.log_scalar_gates(x), memory)

    def block_scores(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> BlockScores:
        """See `Position.block_scores`. memory["keys"] holds earlier keys as the last token left
        them: [batch, heads, keys, head_dim], at least float32."""
        length, head_dim = q.shape[2:]
        with without_autocast(x):
            q, k = at_least_float32(q) / math.sqrt(head_dim), at_least_float32(k)
            size = min(SPAN, 1 << (length - 1).bit_length())  # a power of two, for `own_scores`
            # Tokens behind the text change nothing: their f is 1.
            more = (0, 0, 0, -length % size)
            q, k, log_f = (
                F.pad(tensor, more).contiguous().unflatten(2, (-1, size))
                for tensor in (q, k, self.log_gates(x))
            )
            from_here = log_f.flip(3).cumsum(3).flip(3)  # sums to the end of each span
            total, later = from_here.split([1, size - 1], dim=3)
            faded = k * F.pad(later, (0, 0, 0, 1)).exp()
            by_span = (tensor.unbind(2) for tensor in (q, k, log_f, faded, total))
            spans = [Span(*tensors) for tensors in zip(*by_span, strict=True)]

            earlier = memory.get("keys", spans[0].k[:, :, :0])
            with torch.no_grad():
                keys = faded_keys(earlier, spans)[:, :, : earlier.shape[2] + length]
            memory["keys"] = keys.detach()
        return block_of_scores, [earlier, *chain(*spans)]

    def log_gates(self, x: Tensor) -> Tensor:
        """log f: [batch, length, hidden] -> [batch, heads, length, head_dim], at least float32."""
        gates = F.logsigmoid(self.mapped(x, "weight", "bias"))
        return gates.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

    def log_scalar_gates(self, x: Tensor) -> Tensor:
        """log f of the scalar gates: [batch, length, hidden] -> [batch, heads, length]."""
        return F.logsigmoid(self.mapped(x, "scalar_weight", "scalar_bias")).transpose(1, 2)


def faded_keys(earlier: Tensor, spans: Sequence[Span]) -> Tensor:
    """Earlier keys and those of these spans after them, as the last token of all leaves them."""
    keys = []
    fallen = earlier.new_zeros(
        ()
    )  # log f of all later spans, which a sum from the end never rounds
    for span in reversed(spans):
        keys.append(span.faded * fallen.exp())
        fallen = fallen + span.total
    keys.append(earlier * fallen.exp())
    return torch.cat(keys[::-1], dim=2)


def block_of_scores(
    tensors: Sequence[Tensor], start: int, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The function of `Position.block_scores`, given earlier keys, then the tensors of spans."""
    earlier, *rest = tensors
    count = len(Span._fields)
    spans = [Span(*rest[first : first + count]) for first in range(0, len(rest), count)]
    size = spans[0].q.shape[2]
    assert start % size == 0
    before = spans[: start // size]
    block = spans[start // size : math.ceil(end / size)]
    with without_autocast(earlier):
        far_q, near = [], []
        fallen = earlier.new_zeros(())
        for number, span in enumerate(block):
            own, since = own_scores(span)
            faded_q = span.q * since.exp()
            scores = faded_q @ faded_keys(earlier[:, :, :0], block[:number]).mT
            later = (len(block) - 1 - number) * size
            near.append(F.pad(torch.cat([scores, own], dim=-1), (0, later)))
            far_q.append(faded_q * fallen.exp())
            fallen = fallen + span.total
        rows = end - start
        return (
            torch.cat(far_q, dim=2)[:, :, :rows],
            faded_keys(earlier, before),
            torch.cat(near, dim=2)[:, :, :rows, :rows],
        )


def own_scores(span: Span) -> tuple[Tensor, Tensor]:
    """Scores of a span's own keys, later ones 0: [batch, heads, tokens, tokens]; and the sum of
    log f from its first token to each: [batch, heads, tokens, head_dim].

    Groups of tokens meet in pairs: one token and one, two and two, four and four … Queries of the
    second group and keys of the first fade to the border between them, so no exponent is positive.
    """
    scores = (span.q * span.k).sum(-1)[..., None, None]
    q, k, since = (tensor[:, :, :, None] for tensor in (span.q, span.k, span.log_f))
    until = torch.zeros_like(since)  # log f from the next token to the end of the group
    while scores.shape[2] > 1:  # each is [batch, heads, groups, tokens of a group, features]
        above, below = scores.unflatten(2, (-1, 2)).unbind(3)
        _, later_q = q.unflatten(2, (-1, 2)).unbind(3)
        earlier_k, _ = k.unflatten(2, (-1, 2)).unbind(3)
        since_begin, since_border = since.unflatten(2, (-1, 2)).unbind(3)
        until_border, until_end = until.unflatten(2, (-1, 2)).unbind(3)

        across = (later_q * since_border.exp()) @ (earlier_k * until_border.exp()).mT
        above = F.pad(above, (0, above.shape[-1]))
        scores = torch.cat([above, torch.cat([across, below], dim=-1)], dim=-2)
        since = torch.cat([since_begin, since_begin[..., -1:, :] + since_border], dim=-2)
        until = torch.cat([until_border + since_border[..., -1:, :], until_end], dim=-2)
        q, k = (tensor.unflatten(2, (-1, 2)).flatten(3, 4) for tensor in (q, k))
    return scores[:, :, 0], since[:, :, 0]
