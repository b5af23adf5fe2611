"""The effective receptive field: which tokens change an output (Sandwich, arXiv 2212.10356)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.model import GPT

MOST = 0.99  # of the gradient: the tokens that hold so much are the receptive field


def receptive_field(model: GPT, windows: Sequence[np.ndarray]) -> Tensor:
    """The cumulative normalised gradient by distance, mean over windows: [length] float64, up to 1.

    windows: [length + 1] tokens each
    With g_d the norm of the gradient of the last position's loss by the input embedding d tokens
    back, entry d is (g_0 + … + g_d) / Σ g. Activations are computed again layer by layer: memory
    grows with the length, not with its square.
    """
    total = torch.zeros(len(windows[0]) - 1, dtype=torch.float64)
    checkpointed = model.checkpoint_activations
    model.checkpoint_activations = True
    try:
        for window in windows:
            norms = gradient_norms(model, torch.from_numpy(window.astype(np.int64)))
            by_distance = norms.flip(0)
            total += by_distance.cumsum(0) / norms.sum()
    finally:
        model.checkpoint_activations = checkpointed
    return total / len(windows)


def gradient_norms(model: GPT, window: Tensor) -> Tensor:
    """|∂ loss of the last token / ∂ input embedding| at each position.

    window [length + 1] -> [length] float64 on the CPU
    """
    window = window.to(model.word_embeddings.weight.device)
    inputs, targets = window[None, :-1], window[None, 1:]
    leaves: list[Tensor] = []

    def cut(module: torch.nn.Module, arguments: object, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        leaves.append(leaf)
        return leaf

    hook = model.word_embeddings.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            last = model.features(inputs)[:, -1:]  # [1, 1, hidden]
            loss = model.losses(last, targets[:, -1:]).sum()
            (gradient,) = torch.autograd.grad(loss, leaves)  # [1, length, hidden]
    finally:
        hook.remove()
    return gradient[0].double().norm(dim=-1).cpu()


def receptive_field_tokens(cumulative: Tensor) -> int:
    """The number of last tokens that hold 99 % of the gradient; cumulative [length]."""
    return int((cumulative < MOST).sum()) + 1


def thinned(cumulative: Sequence[float], count: int = 200) -> tuple[list[int], list[float]]:
    """Distances that look evenly spaced on a logarithmic axis, and the values there."""
    distances = sampled(len(cumulative), count).tolist()
    return distances, [round(cumulative[distance], 6) for distance in distances]


def sampled(length: int, count: int) -> Tensor:
    """Distances from 0 to length - 1 that look evenly spaced on a logarithmic axis.

    0, 1, 2, … and then fewer: [count + 1 or fewer] int64.
    """
    last_exponent = torch.log10(torch.tensor(float(max(length - 1, 1)))).item()
    spread = torch.logspace(0, last_exponent, count)
    with_zero = torch.cat([torch.zeros(1), spread])
    return with_zero.round().long().clamp(max=length - 1).unique()
