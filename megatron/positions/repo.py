"""RePo: rotary at real positions that each token's content chooses (arXiv 2512.14391)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Memory, Pair, Position, Shape
from megatron.positions.frequencies import LEAST_BASE, inverse_frequencies
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register
from megatron.positions.rotary import even, rotate_both


@register("repo")
class RePo(Position):
    """Rotary at a position that each token chooses: z = W_f (silu(W_g x) · W_c x), for each head.

    z is a real number. x is the input of the layer's attention, and each layer has its own maps
    (arXiv 2512.14391, with the released code's first values). The causal mask alone tells the order
    of tokens. In the paper's models the first layers have rotary instead: see `pos_emb_layers`. It
    needs as many key heads as heads, unless `by_head` is false.

    gated: whether z is as above, with hidden_size / 8 rows in W_g and W_c; false: z = W x
    by_head: whether each head has its own positions
    base: slowest wavelength / 2π
    init_std: standard deviation of the first values of the maps
    """

    per_layer = True
    grouped_queries = False
    in_parts = ("on_queries_keys_by_content",)
    frequencies: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        gated: bool = True,
        by_head: bool = True,
        base: float = 10000.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(shape)
        even(shape.head_dim, "head_dim:")
        std = positive("init_std", init_std, most=10.0)
        self.grouped_queries = not by_head
        self.gated = gated
        features = shape.hidden
        if gated:
            features = max(1, shape.hidden // 8)
            for name in ("gate_weight", "content_weight"):
                first_values = torch.empty(features, shape.hidden).normal_(0.0, std)
                self.register_parameter(name, nn.Parameter(first_values))
        outputs = shape.heads if by_head else 1
        self.weight = nn.Parameter(torch.empty(outputs, features).normal_(0.0, std))
        base = positive("base", base, least=LEAST_BASE)
        frequencies = inverse_frequencies(shape.head_dim, base).float()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        """q, k [batch, heads, length, head_dim] -> same; x [batch, length, hidden]."""
        with without_autocast(x):
            return rotate_both(q, k, self.positions(x)[..., None] * self.frequencies)

    def positions(self, x: Tensor) -> Tensor:
        """z: [batch, length, hidden] -> [batch, heads or 1, length], at least float32."""
        x = at_least_float32(x)
        if self.gated:
            x = F.silu(self.mapped(x, "gate_weight")) * self.mapped(x, "content_weight")
        return self.mapped(x, "weight").transpose(1, 2)
