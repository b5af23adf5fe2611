"""Selective RoPE: rotary whose angles depend on each token's content (arXiv 2511.17388)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import Memory, Pair, Position, Shape, after_earlier, running_angle
from megatron.positions.frequencies import inverse_frequencies
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register, whole
from megatron.positions.rotary import even, rotate_both

NORM_EPSILON = 1e-6  # of the released code
LOG_DRIFT = (-20.0, 20.0)


@register("selective_rope")
class SelectiveRope(Position):
    """Rotary whose steps depend on the content: pair c of token i turns by θ_c Σ φ_t, t ≤ i.

    φ is a linear map of the layer's input, normalised to length 1 for each head, followed by a
    causal convolution over the last tokens; θ_c = base^(-2c / head_dim). Each layer has its own
    maps (arXiv 2511.17388, with the released code's normalisation and convolution). It needs as
    many key heads as heads.

    rank: rank of the linear map for all heads; null for a full map for each head
    taps: tokens that the convolution reads; null for differences of neighbours, which sum to φ
    base: slowest wavelength / 2π at φ = 1
    drift: whether a positive number, first 1, is learned for each pair and added to φ
    gate: whether φ is multiplied by a learned gate of the token, for each head
    """

    per_layer = True
    grouped_queries = False
    frequencies: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rank: int | None = 16,
        taps: int | None = 4,
        base: float = 500000.0,
        drift: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__(shape)
        pairs = even(shape.head_dim, "head_dim:") // 2
        if shape.hidden % shape.heads:
            raise UserError(
                f"pos_emb: selective_rope cuts {shape.hidden} features into {shape.heads} equal"
                " parts; choose a hidden_size that num_attention_heads divides"
            )
        features = shape.heads * pairs
        self.rank = rank
        if rank is None:
            part = shape.hidden // shape.heads
            bound = math.sqrt(6 / part)
            self.directions = nn.Parameter(
                torch.empty(shape.heads, part, pairs).uniform_(-bound, bound)
            )
            self.lengths = nn.Parameter(torch.ones(shape.heads))
        else:
            rank = whole("rank", rank, most=2**20)
            self.down = linear_weight(rank, shape.hidden)
            self.up = linear_weight(features, rank)
        self.taps, self.filter = 2, None  # differences of neighbours
        if taps is not None:
            self.taps = whole("taps", taps, most=1024)
            self.filter = linear_weight(features, self.taps)
            if self.taps > 1:
                self.crosses_documents = "its convolution over tokens"
        self.log_drift = None
        if drift:
            self.log_drift = nn.Parameter(torch.zeros(shape.heads, pairs))
        self.gate_weight = self.gate_bias = None
        if gate:
            self.gate_weight = linear_weight(shape.heads, shape.hidden)
            bound = 1 / math.sqrt(shape.hidden)
            self.gate_bias = nn.Parameter(torch.empty(shape.heads).uniform_(-bound, bound))
        frequencies = inverse_frequencies(shape.head_dim, positive("base", base))
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        """q, k [batch, heads, length, head_dim] -> same; x [batch, length, hidden].

        memory holds the last values of φ before the convolution, and the sum of all.
        """
        with without_autocast(x):
            return rotate_both(q, k, self.angles(at_least_float32(x), memory))

    def angles(self, x: Tensor, memory: Memory) -> Tensor:
        """Angles within ±2π: x [batch, length, hidden] -> [batch, heads, length, head_dim / 2].

        Summed in float64: over 16384 tokens float32 loses the difference between neighbours.
        """
        by_head = x.unflatten(-1, (self.shape.heads, -1))
        squares = by_head.square().sum(-1, keepdim=True)
        by_head = by_head / (squares + NORM_EPSILON).sqrt()
        if self.rank is not None:  # φ before the convolution: [batch, features, length]
            phi = self.mapped(self.mapped(by_head.flatten(2), "down"), "up").transpose(1, 2)
        else:
            unit = F.normalize(self.bounded("directions"), dim=1)
            weight = self.bounded("lengths")[:, None, None] * unit
            phi = torch.einsum("blhi,hio->bhol", by_head, weight).flatten(1, 2)

        longer = after_earlier(phi, self.taps - 1, memory, "phi")
        if self.filter is None:
            step = longer.diff(dim=2)
        else:
            weight = self.bounded("filter")[:, None]
            step = F.conv1d(longer, weight, groups=phi.shape[1])
        step = step.unflatten(1, (self.shape.heads, -1))
        step = step.permute(0, 1, 3, 2)  # [batch, heads, length, pairs]
        if self.log_drift is not None:
            drift = self.bounded_to("log_drift", *LOG_DRIFT).exp()
            step = step + drift[:, None]
        if self.gate_weight is not None:
            gate = self.mapped(by_head.flatten(2), "gate_weight", "gate_bias").sigmoid()
            step = step * gate.transpose(1, 2)[..., None]
        angle = (running_angle(step, memory) * self.frequencies).fmod(2 * math.pi)
        return angle.to(x.dtype)


def linear_weight(outputs: int, inputs: int) -> nn.Parameter:
    """First values as torch.nn.Linear's: [outputs, inputs]."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
