"""The effective receptive field: how far back what a model reads changes what it says (Sandwich, arXiv 2212.10356)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.model import GPT

MOST = 0.99  # of the gradient: the receptive field reaches so far


def receptive_field(model: GPT, windows: Sequence[np.ndarray]) -> Tensor:
    """Cumulative normalised gradient, mean over windows [length + 1]: [length] float64, rising to 1.

    With g_d the norm of the gradient of the last position's loss by the input embedding d tokens back, entry d is
    (g_0 + … + g_d) / Σ g. Activations are recomputed layer by layer: memory grows with length, not with its square.
    """
    total = torch.zeros(len(windows[0]) - 1, dtype=torch.float64)
    checkpointed, model.checkpoint_activations = model.checkpoint_activations, True
    try:
        for window in windows:
            norms = gradient_norms(model, torch.from_numpy(window.astype(np.int64)))
            total += norms.flip(0).cumsum(0) / norms.sum()
    finally:
        model.checkpoint_activations = checkpointed
    return total / len(windows)


def gradient_norms(model: GPT, window: Tensor) -> Tensor:
    """|∂ loss of the last token / ∂ input embedding| at each position of a window [length + 1]: [length] float64."""
    window = window.to(model.word_embeddings.weight.device)
    leaves: list[Tensor] = []

    def cut(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = model.word_embeddings.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            loss = model.losses(model.features(window[None, :-1])[:, -1:], window[None, -1:])
            (gradient,) = torch.autograd.grad(loss.sum(), leaves)
    finally:
        hook.remove()
    return gradient[0].double().norm(dim=-1).cpu()


def reach(cumulative: Tensor) -> int:
    """The number of last tokens that hold 99 % of the gradient; cumulative [length]."""
    return int((cumulative < MOST).sum()) + 1


def thinned(cumulative: Sequence[float], count: int = 200) -> tuple[list[int], list[float]]:
    """Distances that look evenly spread on a logarithmic axis, and the values there."""
    at = sampled(len(cumulative), count).tolist()
    return at, [round(cumulative[distance], 6) for distance in at]


def sampled(length: int, count: int) -> Tensor:
    """Distances that look evenly spread on the axis: 0, 1, 2, … and then fewer: [count or less] int64."""
    spread = torch.logspace(0, torch.log10(torch.tensor(float(max(length - 1, 1)))).item(), count)
    return torch.cat([torch.zeros(1), spread]).round().long().clamp(max=length - 1).unique()
