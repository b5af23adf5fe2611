"""PaTH: products of Householder matrices between query and key (arXiv 2505.16381)."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import BlockScores, Memory, Position, Shape, after_earlier, running_sum
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import register, whole
from megatron.positions.selective_rope import linear_weight

CHUNK = 64  # tokens whose product has a closed form
CHUNKS = 4  # chunks of a block: attention asks for 256 queries
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


class Stretch(NamedTuple):
    """Several chunks as one, or all earlier tokens: product and moved keys, as of `Chunk`."""

    product: Tensor
    moved: Tensor


Part = TypeVar("Part", Chunk, Stretch)


@register("path")
class Path(Position):
    """A product of matrices between key j and query i: k_jᵀ H_(j+1) … H_i q_i / √head_dim.

    The Householder matrix H_t = I - β_t w_t w_tᵀ depends on the content of token t. w is a map of
    low rank of the layer's input, followed by a causal convolution and SiLU, with length 1; β =
    2·sigmoid of a linear map. Each layer and head has its own (arXiv 2505.16381, with the released
    code's maps). The product over a chunk of tokens has a closed form, the UT transform. In
    generation, every new token changes all cached keys. So the cache keeps them twice, and a token
    costs about twice as much attention.

    rank: rank of the linear map of all heads
    taps: tokens that the convolution reads; 1 for no convolution, so that documents can be kept
        apart
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
        them: [batch, heads, keys, head_dim], at least float32."""
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
            unmoved = torch.eye(head_dim, dtype=w.dtype, device=w.device)
            product = unmoved - w.mT @ inverse @ w
            moved = k - (k @ w.mT).triu(1) @ inverse.mT @ w

            by_chunk = (t.unbind(2) for t in (q, k, w, inverse, product, moved))
            chunks = [Chunk(*tensors) for tensors in zip(*by_chunk, strict=True)]
            no_keys = moved.new_empty(*moved.shape[:2], 0, head_dim)
            earlier = memory.get("keys", no_keys)
            assert isinstance(earlier, Tensor)
            stretches = [Stretch(unmoved, earlier)]
            for start in range(0, len(chunks), CHUNKS):
                stretches.append(joined(chunks[start : start + CHUNKS]))
            tensors = list(chain(*chunks, *stretches))
            with torch.no_grad():
                keys = joined(stretches).moved[:, :, : earlier.shape[2] + length]
            memory["keys"] = keys.detach()
        return partial(block_of_scores, len(chunks)), tensors

    def transitions(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """w of length 1 and β: x [batch, length, hidden] -> [batch, heads, length, head_dim] and
        [batch, heads, length]. memory["w"] holds what the convolution needs of the last tokens."""
        mapped = self.mapped(self.mapped(x, "down"), "up").transpose(1, 2)
        longer = after_earlier(mapped, self.taps - 1, memory, "w")
        mixed = F.conv1d(longer, self.bounded("filter")[:, None], groups=mapped.shape[1])
        w = F.silu(mixed).unflatten(1, (self.shape.heads, -1)).transpose(2, 3)
        w = w * (w.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        strength = self.mapped(x, "strength_weight", "strength_bias")
        return w, 2 * strength.sigmoid().transpose(1, 2)


@register("path_fox")
class PathFox(Path):
    """PaTH with the forget gates of FoX: the score of path plus Σ log f_l / √head_dim.

    f = sigmoid of a linear map, as in `fox`. As in the released code (arXiv 2505.16381), the sum is
    divided by √head_dim together with the score.
    """

    def __init__(self, shape: Shape, **maps: int) -> None:
        super().__init__(shape, **maps)
        self.gate_weight = linear_weight(shape.heads, shape.hidden)
        self.gate_bias = nn.Parameter(torch.zeros(shape.heads))

    def score_bias(self, x: Tensor, memory: Memory) -> tuple[None, Tensor]:
        """Minus the sum of log f up to each key, as of `fox`: [batch, heads, keys].

        memory["total"] holds the sums.
        """
        with without_autocast(x):
            total = running_sum(self.log_gates(x), memory)
            return None, -total / math.sqrt(self.shape.head_dim)

    def log_gates(self, x: Tensor) -> Tensor:
        """log f: [batch, length, hidden] -> [batch, heads, length]."""
        return F.logsigmoid(self.mapped(x, "gate_weight", "gate_bias")).transpose(1, 2)


def parts_of(kind: type[Part], tensors: Sequence[Tensor]) -> list[Part]:
    """These tensors as chunks or stretches."""
    count = len(kind._fields)
    return [kind(*tensors[first : first + count]) for first in range(0, len(tensors), count)]


def joined(parts: Sequence[Chunk] | Sequence[Stretch]) -> Stretch:
    """Neighbouring parts as one: the product of all, and their keys at the end of the last."""
    *before, last = parts
    keys, later = [last.moved], last.product.mT
    for part in reversed(before):
        keys.append(part.moved @ later)
        later = part.product.mT @ later
    return Stretch(later.mT, torch.cat(keys[::-1], dim=2))


def block_of_scores(
    chunk_count: int, tensors: Sequence[Tensor], start: int, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The function of `Position.block_scores`, given the tensors of chunks, then of stretches."""
    end_of_chunks = chunk_count * len(Chunk._fields)
    chunks = parts_of(Chunk, tensors[:end_of_chunks])
    stretches = parts_of(Stretch, tensors[end_of_chunks:])
    size = chunks[0].q.shape[2]
    blocks_before, rest = divmod(start, size * CHUNKS)
    assert rest == 0
    with without_autocast(chunks[0].q):
        block = chunks[start // size : math.ceil(end / size)]
        moved_q, near = [], []
        for number, chunk in enumerate(block):
            by_w = (chunk.q @ chunk.w.mT).tril()  # [batch, heads, queries, tokens]
            solved = by_w @ chunk.inverse
            scores = [chunk.q @ chunk.k.mT - solved @ (chunk.w @ chunk.k.mT).tril(-1)]
            q = chunk.q - solved @ chunk.w  # at the chunk's begin
            for before in reversed(block[:number]):
                scores.append(q @ before.moved.mT)
                q = q @ before.product
            moved_q.append(q)
            later = (len(block) - 1 - number) * size
            near.append(F.pad(torch.cat(scores[::-1], dim=-1), (0, later)))
        rows = end - start
        far_k = joined(stretches[: 1 + blocks_before]).moved  # the first one is the earlier text
        return (
            torch.cat(moved_q, dim=2)[:, :, :rows],
            far_k,
            torch.cat(near, dim=2)[:, :, :rows, :rows],
        )
