"""Cable: a penalty that grows with the tokens in between, each as much as its content says (arXiv 2503.08067)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Position, Shape, at_least_float32
from megatron.positions.registry import positive, register


@register("cable")
class Cable(Position):
    """-g_i (S_i - S_j) for query i and key j; S the running sum of ReLU(x w_c), g = softplus(x w_s), by head and layer.

    The paper prints g_i (S_i - S_j), which is never negative and would favour far tokens, against its text and its
    figures; its released code adds cumsum(-softplus(.))_i - cumsum(-softplus(.))_j, a penalty, and so is this.

    init_std: spread of the first values of w_c and w_s
    """

    per_layer = True

    def __init__(self, shape: Shape, *, init_std: float = 0.02) -> None:
        super().__init__(shape)
        std = positive("init_std", init_std)
        self.step = nn.Parameter(
            torch.empty(shape.hidden, shape.heads).normal_(0.0, std)
        )  # the paper's w_c
        self.gain = nn.Parameter(
            torch.empty(shape.hidden, shape.heads).normal_(0.0, std)
        )  # the paper's w_s

    def on_scores(self, scores: Tensor, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """scores [batch, heads, queries, keys], x [batch, queries, hidden] -> scores; memory keeps S of all keys."""
        with torch.autocast(x.device.type, enabled=False):
            x = at_least_float32(x)
            step = torch.relu(x @ self.bounded("step")).transpose(1, 2)  # [batch, heads, queries]
            gain = F.softplus(x @ self.bounded("gain")).transpose(1, 2)
            path = step.cumsum(dim=-1)
            if "path" in memory:
                path = torch.cat(
                    [memory["path"], memory["path"][..., -1:] + path], dim=-1
                )  # [batch, heads, keys]
            memory["path"] = path
            return scores - gain[..., None] * (
                path[..., -step.shape[-1] :, None] - path[..., None, :]
            )
