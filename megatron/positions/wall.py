"""Wall attention: a forget gate at every token for each feature (Tilde Research, 2026)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import BlockScores, Memory, Position, Shape, running_sum
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register

SPAN = 256  # tokens whose keys fade to one place: attention asks for so many queries
TENSORS = 5  # of a span, see `block_scores`


@register("wall")
class Wall(Position):
    """A forget gate for each feature: Σ_c q_ic k_jc exp(Σ log f_lc) / √head_dim, l = j+1 … i.

    i is the query and j the key. f = sigmoid(W x + b) has a number for each feature c of each head,
    in every layer, so that some features forget faster than others (Tilde Research, 2026, as in
    flash-linear-attention's `wall_attn`). b starts large, so f starts near 1 and the scores near
    q·k. For the sink of the released code set `softmax_type`. In generation, every new token
    changes all cached keys, so the cache keeps them twice. It needs as many key heads as heads.

    gate_bias: first value of b
    init_std: standard deviation of the first values of W
    scalar_gate: whether each head also has the gate of `fox`, with these first values
    """

    per_layer = True
    grouped_queries = False
    in_parts = ("score_bias",)

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
        gates = {"": shape.heads * shape.head_dim}
        if scalar_gate:
            gates["scalar_"] = shape.heads
        for name, count in gates.items():
            weight = torch.empty(count, shape.hidden).normal_(0.0, std)
            self.register_parameter(f"{name}weight", nn.Parameter(weight))
            self.register_parameter(f"{name}bias", nn.Parameter(torch.full((count,), start)))
        self.scalar_gate = scalar_gate

    def has(self, hook: str) -> bool:
        return super().has(hook) and (hook != "score_bias" or self.scalar_gate)

    def score_bias(self, x: Tensor, memory: Memory) -> tuple[None, Tensor]:
        """Minus the sum of the scalar gates' log f up to each key: [batch, heads, keys]."""
        with without_autocast(x):
            log_f = F.logsigmoid(self.mapped(x, "scalar_weight", "scalar_bias"))
            return None, -running_sum(log_f.transpose(1, 2), memory)

    def block_scores(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> BlockScores:
        """See `Position.block_scores`. memory["keys"] holds earlier keys as the last token left
        them: [batch, heads, keys, head_dim], at least float32.

        Tensors: earlier keys; then for each span of tokens q, k, log f and the keys as its last
        token leaves them, each [batch, heads, tokens, head_dim], and its sum of log f.
        """
        with without_autocast(x):
            q, k = at_least_float32(q) / math.sqrt(q.shape[3]), at_least_float32(k)
            log_f = F.logsigmoid(self.mapped(x, "weight", "bias"))
            log_f = log_f.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

            earlier = memory.get("keys", k[:, :, :0])
            tensors = [earlier]
            spans = (numbers.split(SPAN, dim=2) for numbers in (q, k, log_f))
            for queries, keys, gates in zip(*spans, strict=True):
                faded = keys * sums_after(gates).exp()
                tensors += [queries, keys, gates, faded, gates.sum(2, keepdim=True)]
            with torch.no_grad():
                keys = faded_keys(earlier, tensors[4::TENSORS], tensors[5::TENSORS])
            memory["keys"] = keys.detach()
        return block_of_scores, tensors


def sums_after(log_f: Tensor) -> Tensor:
    """The sum over the later tokens, for each: [..., tokens, head_dim] -> same.

    Not the sum of all less that up to the token, whose rounding would be that of the largest.
    """
    shifted = F.pad(log_f[..., 1:, :], (0, 0, 0, 1))
    return shifted.flip(-2).cumsum(-2).flip(-2)


def faded_keys(earlier: Tensor, keys: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
    """Earlier keys and those of the spans after them, as the last token of all leaves them.

    keys: of each span, as its last token leaves them; totals: each span's sum of log f
    """
    parts = []
    fallen = earlier.new_zeros(())
    for keys_of_span, total in zip(reversed(keys), reversed(totals), strict=True):
        parts.append(keys_of_span * fallen.exp())
        fallen = fallen + total
    parts.append(earlier * fallen.exp())
    return torch.cat(parts[::-1], dim=2)


def block_of_scores(
    tensors: Sequence[Tensor], start: int, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The function of `Position.block_scores`: see `Wall.block_scores` for the tensors."""
    earlier, *rest = tensors
    q, k, log_f, faded, totals = (rest[number::TENSORS] for number in range(TENSORS))
    first, last = start // SPAN, math.ceil(end / SPAN)
    with without_autocast(earlier):
        queries, keys, gates = (torch.cat(parts[first:last], dim=2) for parts in (q, k, log_f))
        far_q = queries * gates.cumsum(2).exp()
        far_k = faded_keys(earlier, faded[:first], totals[:first])
        return far_q, far_k, own_scores(queries, keys, gates)


def own_scores(q: Tensor, k: Tensor, log_f: Tensor) -> Tensor:
    """Scores of neighbouring tokens among themselves, 0 for later keys.

    Groups of tokens meet in pairs: one token and one, two and two, four and four … Queries of the
    second group and keys of the first fade to the border between them.

    q, k, log_f [batch, heads, length, head_dim] -> [batch, heads, length, length]
    """
    length, size = q.shape[2], 1
    whole = 1 << (length - 1).bit_length()
    q, k, log_f = (F.pad(numbers, (0, 0, 0, whole - length)) for numbers in (q, k, log_f))
    scores = (q * k).sum(-1)[..., None, None]  # [batch, heads, groups, size, size]
    while size < whole:
        later_q = q.unflatten(2, (-1, 2, size))[:, :, :, 1]
        earlier_k = k.unflatten(2, (-1, 2, size))[:, :, :, 0]
        before, after = log_f.unflatten(2, (-1, 2, size)).unbind(3)
        later_q = later_q * after.cumsum(-2).exp()
        earlier_k = earlier_k * sums_after(before).exp()

        across = later_q @ earlier_k.mT
        upper, lower = scores.unflatten(2, (-1, 2)).unbind(3)
        lower = torch.cat([across, lower], dim=-1)
        scores = torch.cat([F.pad(upper, (0, size)), lower], dim=-2)
        size *= 2
    return scores[:, :, 0, :length, :length]
