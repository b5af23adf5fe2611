"""No positional encoding: the causal mask alone gives the order (NoPE, arXiv 2305.19466)."""

from megatron.positions.base import Position
from megatron.positions.registry import register


@register("none")
class NoPosition(Position):
    """Nothing is added: every hook is the identity."""

    published = True
