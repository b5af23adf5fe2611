"""PaTH: products of Householder matrices between query and key (arXiv 2505.16381)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import BlockScores, Memory, Position, Shape, after_earlier, running_sum
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import register, whole
from megatron.positions.selective_rope import linear_weight

CHUNK = 64  # tokens whose product has a closed form
NORM_EPSILON = 1e-6


class Chunk(NamedTuple):
    """Tensors of a chunk of tokens: [batch, heads, tokens, head_dim], but for two.

    inverse [batch, heads, tokens, tokens]: T of the UT transform, (I + diag(β) L)⁻¹ diag(β) with L
    the part of w·wᵀ below its diagonal; product [batch, heads, head_dim, head_dim]: that of all
    matrices, which q is multiplied with from the last to the first; moved: keys at the chunk's end
    """

    q: Tensor
    k: Tensor
    w: Tensor
    inverse: Tensor
    product: Tensor
    moved: Tensor


@register("path")
class Path(Position):
    """k_jᵀ H_(j+1) … H_i q_i / √head_dim with H_t = I - β_t w_t w_tᵀ, by the content of token t.

    w is a map of low rank of the layer's input, then a causal convolution, SiLU, and length 1; β =
    2·sigmoid of a linear map. Each layer and head has its own (arXiv 2505.16381, with the released
    code's maps). The product over a chunk of tokens has a closed form, the UT transform, so that
    4096 tokens take 2.1 to 3.6 times plain attention, and memory grows with length. Every new token
    of a cached text changes all cached keys: the cache keeps them twice, as they were and in
    float32 as they are, and a token costs about twice as much attention.

    rank: rank of the linear map of all heads
    taps: tokens of the convolution; 1 for none, so that documents can be kept apart
    """

    per_layer = True
    grouped_queries = False

    def __init__(self, shape: Shape, *, rank: int = 32, taps: int = 3) -> None:
        super().__init__(shape)
        rank = whole("rank", rank, most=2**20)
        features = shape.heads * shape.head_dim
        self.taps = whole("taps", taps, most=1024)
        if self.taps > 1:
            self.crosses_documents = "its convolution over tokens"
        self.down = linear_weight(rank, shape.hidden)
        self.up = linear_weight(features, rank)
        self.filter = linear_weight(features, self.taps)
        self.strength_weight = linear_weight(shape.heads, shape.hidden)
        self.strength_bias = nn.Parameter(torch.zeros(shape.heads))

    def block_scores(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> BlockScores:
        """See `Position.block_scores`. memory["keys"] holds earlier keys as the last token left
        them: [batch, heads, keys, head_dim] float32."""
        length, head_dim = q.shape[2:]
        with without_autocast(x):
            w, beta = self.transitions(at_least_float32(x), memory)
            q = at_least_float32(q) / math.sqrt(head_dim)
            # Tokens behind the text change nothing: their β is 0.
            size = min(CHUNK, length)
            more = -length % size
            q, k, w = (F.pad(t, (0, 0, 0, more)) for t in (q, at_least_float32(k), w))
            beta = F.pad(beta, (0, more))
            # Contiguous, as every product would copy a view of a projection again.
            q, k, w, beta = (
                t.contiguous().unflatten(2, (-1, size)) for t in (q, k, w, beta[..., None])
            )

            identity = torch.eye(size, dtype=w.dtype, device=w.device)
            below = (beta * (w @ w.mT)).tril(-1)
            inverse = torch.linalg.solve_triangular(
                identity + below, beta.mT * identity, upper=False, unitriangular=True
            )
            product = torch.eye(head_dim, dtype=w.dtype, device=w.device) - w.mT @ inverse @ w
            moved = k - (k @ w.mT).triu(1) @ inverse.mT @ w

        of_all = (q, k, w, inverse, product, moved)
        by_chunk = zip(*(t.unbind(2) for t in of_all), strict=True)
        tensors = [tensor for chunk in by_chunk for tensor in chunk]
        earlier = memory["keys"] if "keys" in memory else k.new_empty(*k.shape[:2], 0, head_dim)
        tensors.append(earlier)
        with torch.no_grad(), without_autocast(x):
            chunks, _ = chunks_of(tensors)
            keys = keys_after(chunks, earlier)
            memory["keys"] = keys[:, :, : earlier.shape[2] + length].detach()
        return block_of_scores, tensors

    def transitions(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """w of length 1 and β: x [batch, length, hidden] -> [batch, heads, length, head_dim] and
        [batch, heads, length]. memory["w"] holds what the convolution needs of the last tokens."""
        mapped = F.linear(F.linear(x, self.bounded("down")), self.bounded("up")).transpose(1, 2)
        longer = after_earlier(mapped, self.taps - 1, memory, "w")
        mixed = F.conv1d(longer, self.bounded("filter")[:, None], groups=mapped.shape[1])
        w = F.silu(mixed).unflatten(1, (self.shape.heads, -1)).transpose(2, 3)
        w = w * (w.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        strength = F.linear(x, self.bounded("strength_weight"), self.bounded("strength_bias"))
        return w, 2 * strength.sigmoid().transpose(1, 2)


@register("path_fox")
class PathFox(Path):
    """path's score plus Σ log f_l / √head_dim over the tokens l = j+1 … i between key and query.

    f = sigmoid of a linear map, as in `fox`; but as the released code has it, the sum is divided by
    √head_dim together with the score (arXiv 2505.16381).
    """

    def __init__(self, shape: Shape, *, rank: int = 32, taps: int = 3) -> None:
        super().__init__(shape, rank=rank, taps=taps)
        self.gate_weight = linear_weight(shape.heads, shape.hidden)
        self.gate_bias = nn.Parameter(torch.zeros(shape.heads))

    def block_scores(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> BlockScores:
        """As of Path. memory["total"] holds the sums of log f up to each key."""
        function, tensors = super().block_scores(q, k, x, memory)
        with without_autocast(x):
            total = running_sum(self.log_gates(at_least_float32(x)), memory)
            total = total / math.sqrt(self.shape.head_dim)

        def gated(tensors: Sequence[Tensor], start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
            *of_path, total = tensors
            far_q, far_k, own = function(of_path, start, end)
            before, rows = far_k.shape[2], own.shape[2]
            # The sum up to the query is the same for all of its keys.
            total = total[:, :, : before + rows]
            bias = (total[:, :, before, None] - total).to(own.dtype)
            of_far, of_own = bias.split([before, rows], dim=2)
            far_q = F.pad(far_q, (0, 1), value=1.0)
            far_k = torch.cat([far_k, of_far[..., None]], dim=-1)
            return far_q, far_k, own + of_own[:, :, None]

        return gated, [*tensors, total]

    def log_gates(self, x: Tensor) -> Tensor:
        """log f: [batch, length, hidden] -> [batch, heads, length]."""
        gate = F.linear(x, self.bounded("gate_weight"), self.bounded("gate_bias"))
        return F.logsigmoid(gate).transpose(1, 2)


def chunks_of(tensors: Sequence[Tensor]) -> tuple[list[Chunk], Tensor]:
    """The chunks, and the keys of earlier tokens, of what Path gives to attention."""
    count = len(Chunk._fields)
    *of_chunks, earlier = tensors
    starts = range(0, len(of_chunks), count)
    return [Chunk(*of_chunks[start : start + count]) for start in starts], earlier


def keys_after(chunks: Sequence[Chunk], earlier: Tensor) -> Tensor:
    """All keys as these chunks leave them: [batch, heads, keys, head_dim]."""
    features = earlier.shape[-1]
    later = torch.eye(features, dtype=earlier.dtype, device=earlier.device)
    keys = []
    for chunk in reversed(chunks):
        keys.append(chunk.moved @ later)
        later = chunk.product.mT @ later
    keys.append(earlier @ later)
    return torch.cat(keys[::-1], dim=2)


def block_of_scores(
    tensors: Sequence[Tensor], start: int, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The function of `Position.block_scores`."""
    chunks, earlier = chunks_of(tensors)
    size = chunks[0].q.shape[2]
    assert start % size == 0
    with without_autocast(earlier):
        own_chunks = chunks[start // size : math.ceil(end / size)]
        moved_q, own = [], []
        for number, chunk in enumerate(own_chunks):
            by_w = (chunk.q @ chunk.w.mT).tril()  # [batch, heads, queries, tokens]
            solved = by_w @ chunk.inverse
            scores = [chunk.q @ chunk.k.mT - solved @ (chunk.w @ chunk.k.mT).tril(-1)]
            q = chunk.q - solved @ chunk.w  # at the chunk's begin
            for before in reversed(own_chunks[:number]):
                scores.append(q @ before.moved.mT)
                q = q @ before.product
            moved_q.append(q)
            later = (len(own_chunks) - 1 - number) * size
            own.append(F.pad(torch.cat(scores[::-1], dim=-1), (0, later)))
        rows = end - start
        far_k = keys_after(chunks[: start // size], earlier)
        return (
            torch.cat(moved_q, dim=2)[:, :, :rows],
            far_k,
            torch.cat(own, dim=2)[:, :, :rows, :rows],
        )
