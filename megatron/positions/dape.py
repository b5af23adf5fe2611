"""DAPE: a small network of each layer corrects the biases by the scores of all heads.

v1 (arXiv 2405.14722) looks at one pair of tokens at a time, v2 (arXiv 2410.04798) also at the keys
beside it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Around, Memory, Shape
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import build_inside, register, whole

SLOPE = 0.01  # of LeakyReLU below 0
MOST_WIDTH = 4096
CACHED_PAIRS = 2**14
"""Pairs of tokens whose hidden layer a core keeps in its cache: 2 MiB of the default width."""


@register("dape")
class Dape(Around):
    """A small network that corrects the scores and a bias: A + B + f([A; B]).

    A = q·k/√head_dim, and B is the bias of another encoding. f has two layers with LeakyReLU and
    works on each pair of tokens: all heads of A and of B -> width -> heads (arXiv 2405.14722,
    equation 4). Each layer of the model has its own f. Without a bias, as with `of: none` or
    rotary, the formula is A + f(A).

    of: the encoding that gives B; if it rotates queries and keys, it still does
    args: options of that encoding
    width: width of the hidden layer
    """

    per_layer = True
    taps = 1

    def __init__(
        self,
        shape: Shape,
        *,
        of: str = "kerple_log",
        args: Mapping[str, Any] | None = None,
        width: int = 32,
    ) -> None:
        super().__init__(shape)
        self.inner, _ = build_inside(shape, of, args, example="kerple_log")
        self.by_distance = self.inner.by_distance and not self.inner.has("index_bias")
        self.grouped_queries = self.inner.grouped_queries
        self.heads_per_query = self.inner.heads_per_query
        self.has_bias = self.inner.has("index_bias") or self.inner.distance_bias(1) is not None
        inputs = 2 * shape.heads if self.has_bias else shape.heads
        hidden = whole("width", width, most=MOST_WIDTH)
        self.take_over(nn.Conv1d(inputs, hidden, self.taps), "{}_0")  # [width, inputs, taps]
        self.take_over(nn.Conv1d(hidden, shape.heads, self.taps), "{}_1")

    def prepare(self, length: int) -> None:
        self.inner.prepare(length)

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """scores [batch, heads, queries, keys] -> same; those of later keys mean nothing."""
        inputs = scores = at_least_float32(scores)
        batch, heads, queries, keys = scores.shape
        rows = queries
        if scores.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = max(1, CACHED_PAIRS // (batch * keys))
        with without_autocast(scores):
            if self.has_bias:
                key = torch.arange(keys, device=scores.device)
                bias = self.inner.bias_between(key[keys - queries :], key, keys)
                inputs = torch.cat([scores, bias.expand_as(scores)], dim=1)
            corrections, later = [], queries
            for block in inputs.split(rows, dim=2):
                later -= block.shape[2]
                seen = block[..., : keys - later]
                corrections.append(F.pad(self.correction(seen), (0, later)))
            return inputs.unflatten(1, (-1, heads)).sum(1) + torch.cat(corrections, dim=2)

    def correction(self, inputs: Tensor) -> Tensor:
        """f: [batch, heads of A and B, queries, keys] -> [batch, heads, queries, keys]."""
        return self._layer(1, F.leaky_relu(self._layer(0, inputs), SLOPE))

    def _layer(self, number: int, x: Tensor) -> Tensor:
        """[batch, inputs, queries, keys] -> [batch, outputs, queries, keys]."""
        weight, bias = self.bounded(f"weight_{number}"), self.bounded(f"bias_{number}")
        return F.conv2d(x, weight[:, :, None], bias, padding="same")


@register("dape_v2")
class DapeV2(Dape):
    """DAPE whose network also sees the two neighbouring keys: convolutions of 1 x 3.

    See arXiv 2410.04798. f sees 0 for the scores and biases of later keys. At the end of the text
    the authors' second convolution reads padding. Ours reads the values of a longer text, so that
    no score depends on later tokens; only the score of the last token with itself differs.
    """

    taps = 3
    crosses_documents = "its convolution over keys"

    def correction(self, inputs: Tensor) -> Tensor:
        queries, keys = inputs.shape[-2:]
        visible = inputs.tril(keys - queries)
        return super().correction(F.pad(visible, (0, 1)))[..., :keys]  # with the next key
