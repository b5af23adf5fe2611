"""The activations of the MLP, by their name in the YAML key `activation`."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """function: [..., widened] -> [..., width]; gated: whether `widened` is twice the width."""

    function: Callable[[Tensor], Tensor]
    gated: bool = False


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh, as GPT-2 computes it: same shape."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202), the gate first: [..., 2 width] -> [..., width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS = {
    "gelu": Activation(F.gelu),
    "gelu_new": Activation(gelu_new),
    "relu": Activation(F.relu),
    "silu": Activation(F.silu),
    "swiglu": Activation(swiglu, gated=True),
}
