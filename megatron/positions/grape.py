"""GRAPE: rotations and penalties on distance, learned or by content (arXiv 2512.07805).

The formulas are those of the released code, model-architectures/GRAPE.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.alibi import alibi_slopes
from megatron.positions.base import (
    Memory,
    Pair,
    Position,
    Shape,
    Turning,
    running_angle,
    with_earlier,
)
from megatron.positions.frequencies import inverse_frequencies
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import chosen, positive, register, whole
from megatron.positions.rotary import even, rotate, rotate_both

NORM_EPSILON = 1e-6  # of the released code
SCALE = 16.0  # of the released code: what it learns is divided by this, so that it moves slowly
START = -math.log(1000.0 - 1)  # of b; divided by SCALE, so that the first steps are 0.394


@register("grape_m")
class GrapeM(Turning):
    """Rotary with learned frequencies: turned by the position or by Σ sigmoid(w·x_t + b).

    The commuting form of GRAPE-M (arXiv 2512.07805), with the released code's parameters:
    frequencies are exp(f / 16) if positions turn them and exp(f) if content does; w and b are
    divided by 16 too. Each layer has its own. It turns in the opposite direction of rotary.

    by_content: whether the step from token t to the next depends on the layer's input, for each
        head
    by_head: whether each head has its own frequencies
    base: base of the first frequencies, which are rotary's
    """

    per_layer = True
    bounds = {"log_frequencies": (-16 * SCALE, 2 * SCALE)}

    def __init__(
        self,
        shape: Shape,
        *,
        by_content: bool = False,
        by_head: bool = False,
        base: float = 10000.0,
    ) -> None:
        super().__init__(shape)
        frequencies = inverse_frequencies(
            even(shape.head_dim, "head_dim:"), positive("base", base)
        ).log()
        self.by_content = by_content
        self.scale = 1.0 if self.by_content else SCALE
        heads = shape.heads if by_head else 1
        self.grouped_queries = heads == 1 and not self.by_content
        start = (self.scale * frequencies).float()
        self.log_frequencies = nn.Parameter(start.repeat(heads, 1))  # [heads or 1, head_dim / 2]
        self.weight = self.bias = None
        if self.by_content:
            self.weight = nn.Parameter(torch.zeros(shape.heads, shape.hidden))
            self.bias = nn.Parameter(torch.full((shape.heads,), START))

    def has(self, hook: str) -> bool:
        """Content is looked at where the steps depend on it, and positions where they do not."""
        if hook == "on_queries_keys_by_content":
            return self.by_content
        if hook == "on_queries_keys_at":
            return not self.by_content
        return super().has(hook)

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        """[batch, heads, length, head_dim] each -> same."""
        if self.by_content:
            return q, k
        with without_autocast(q):
            frequencies = self._frequencies()[:, None]  # [heads or 1, 1, head_dim / 2]
            if key is query:
                return rotate_both(q, k, -query[:, None] * frequencies)
            angles = (-position[:, None] * frequencies for position in (query, key))
            turned_q, turned_k = (
                rotate(x, angle.cos(), angle.sin()) for x, angle in zip((q, k), angles, strict=True)
            )
            return turned_q, turned_k

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        """The same by content; x [batch, length, hidden]. memory["sum"]: that of all steps."""
        if not self.by_content:
            return q, k
        with without_autocast(x):
            step = (self.mapped(x, "weight", "bias") / SCALE).sigmoid().transpose(1, 2)
            before = memory.get("sum", step.new_zeros(*step.shape[:2], 1).double())
            total = torch.cat([before, running_angle(step, memory)], dim=-1)
            phase = total[..., :-1, None]  # the steps before each token: [batch, heads, length, 1]
            turns = phase * self._frequencies()[:, None].double()
            angle = turns.fmod(2 * math.pi).to(self.origin.dtype)  # [batch, heads, length, pairs]
            return rotate_both(q, k, -angle)

    def _frequencies(self) -> Tensor:
        low, high = self.bounds["log_frequencies"]
        scaled = self.scale / SCALE
        return (self.bounded_to("log_frequencies", scaled * low, scaled * high) / self.scale).exp()


@register("grape_a")
class GrapeA(Position):
    """ALiBi whose slopes depend on query and key: -d · s · g(ω) · (g(q·v/√D) + g(k·u/√D)).

    g is softplus, s are ALiBi's slopes and D is head_dim. ω and the unit vectors v and u are
    learned for each head in every layer (GRAPE-A, arXiv 2512.07805).

    gates: which of the two terms are used: query_key, query (the first) or key
    """

    per_layer = True
    score_rank = 3
    slopes: Tensor

    def __init__(self, shape: Shape, *, gates: str = "query_key") -> None:
        super().__init__(shape)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(shape.heads)), persistent=False)
        start = math.log(math.expm1(1.0))  # softplus of this is 1
        self.omega = nn.Parameter(torch.full((shape.heads,), start))
        chosen("gates", gates, ("query_key", "query", "key"))
        size, std = (shape.heads, shape.head_dim), shape.head_dim**-0.5
        self.query_direction = self.key_direction = None
        if gates != "key":
            self.query_direction = nn.Parameter(std * torch.randn(size))
        if gates != "query":
            self.key_direction = nn.Parameter(std * torch.randn(size))
        self._pair: Pair | None = None

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        """Keep both for `score_bias`, which is called next."""
        self._pair = q, k
        return q, k

    def score_bias(self, x: Tensor, memory: Memory) -> Pair:
        """u [batch, heads, queries, 3] and w [batch, heads, keys, 3].

        With slopes a of queries and b of keys, -(i - j)(a_i + b_j) is a_i j - i b_j + j b_j and a
        number for each query. memory["slopes"] holds b.
        """
        assert self._pair is not None
        q, k = self._pair
        self._pair = None
        with without_autocast(q):
            a = self._slopes("query_direction", q)
            b = with_earlier(self._slopes("key_direction", k).double(), memory, "slopes")
            key = self.distances(b.shape[-1]).expand_as(b)
            query = key[..., -a.shape[-1] :]
            u = torch.stack([a, -query, torch.ones_like(query)], dim=-1)
            return u, torch.stack([key, b, key * b], dim=-1)

    def _slopes(self, direction: str, x: Tensor) -> Tensor:
        """[batch, heads or key heads, length, head_dim] -> [batch, heads, length]."""
        if getattr(self, direction) is None:
            return x.new_zeros(len(x), self.shape.heads, x.shape[2], dtype=self.origin.dtype)
        unit = F.normalize(self.bounded(direction), dim=-1, eps=NORM_EPSILON)
        by_key_head = unit.unflatten(0, (x.shape[1], -1))
        products = torch.einsum("bkld,khd->bkhl", at_least_float32(x), by_key_head).flatten(1, 2)
        factor = self.slopes * F.softplus(self.bounded("omega"))
        return factor[:, None] * F.softplus(products / math.sqrt(self.shape.head_dim))


@register("grape_ap")
class GrapeAP(Position):
    """A penalty that adds up along the path to the key: Σ s log sigmoid(p_i·r_l / D).

    The sum is over l = j+1 … i for query i and key j; p = P x, and s are ALiBi's slopes (GRAPE-AP,
    arXiv 2512.07805). r_l is p_l divided by its root mean square and turned by -l radians, all
    pairs by the same angle. P is learned for each head in every layer and starts near 0, so the
    bias starts near ALiBi's times ln 2. As in the released code p_i is not turned, so the bias
    depends on both indices, not only on their distance.

    features: D, the number of features of p for each head
    """

    per_layer = True
    by_distance = False
    slopes: Tensor

    def __init__(self, shape: Shape, *, features: int = 8) -> None:
        super().__init__(shape)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(shape.heads)), persistent=False)
        size = shape.heads * even(whole("features", features, most=2**20), "features:")
        std = 0.5 / math.sqrt(shape.hidden)
        self.weight = nn.Parameter(std * torch.randn(size, shape.hidden))

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """scores [batch, heads, queries, keys] -> same; x [batch, queries, hidden].

        memory["r"] holds r of all keys.
        """
        queries, keys = scores.shape[-2:]
        with without_autocast(x):
            p = self.mapped(x, "weight").unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)
            place = self.indices(keys - queries, queries).double()
            angle = place[:, None].expand(-1, p.shape[-1] // 2)
            cos, sin = angle.cos().to(p.dtype), angle.sin().to(p.dtype)
            r = with_earlier(rotate(F.rms_norm(p, p.shape[-1:]), cos, -sin), memory, "r")
            step = self.slopes[:, None, None] * F.logsigmoid(p @ r.mT / p.shape[-1])
            # Those of later tokens are 0, and that of the key itself does not count.
            step = step.tril(keys - queries)
            return scores + step.flip(-1).cumsum(-1).flip(-1) - step
