"""Attention of a real text by layer and head, as in figure 2 of MEP (arXiv 2403.17698)."""

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from megatron.report.figures.positions import style

LOWEST = 1e-3  # probabilities below look the same


def draw_attention(probabilities: Tensor, title: str, text: str = "") -> Figure:
    """Layers downward, heads to the right; in each map queries downward, keys to the right, on a logarithmic scale."""
    layers, heads, length, _ = probabilities.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    side = max(0.58, min(1.6, 7.2 / heads))
    with style():
        figure = Figure(figsize=(side * heads + 1.3, side * layers + 0.8), layout="constrained")
        places = figure.subplots(layers, heads, squeeze=False)
        norm, image = LogNorm(LOWEST, 1), None
        for layer in range(layers):
            for head in range(heads):
                axes = places[layer, head]
                shown = (
                    probabilities[layer, head].clamp(min=LOWEST).masked_fill(future, float("nan"))
                )
                image = axes.imshow(
                    shown.numpy(), norm=norm, cmap="viridis", interpolation="nearest"
                )
                axes.set_xticks([])
                axes.set_yticks([])
                axes.spines[:].set_visible(False)
                if layer == 0:
                    axes.set_title(f"head {head}" if heads <= 6 else f"{head}", fontsize=8, pad=2)
                if head == 0:
                    axes.set_ylabel(
                        f"layer {layer}" if layers <= 6 else f"{layer}", fontsize=8, labelpad=2
                    )
        assert image is not None
        bar = figure.colorbar(
            image, ax=places, pad=0.01, aspect=30, shrink=0.9, label="attention probability"
        )
        bar.set_ticks([1, 0.1, 0.01, LOWEST], labels=["1", "0.1", "0.01", f"≤ {LOWEST:g}"])
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        said = (
            "layers downward, heads to the right; in each map queries downward, keys to the right"
        )
        said += f"\n{length} tokens" + (f": {text}" if text else "")
        figure.supxlabel(said, x=0.01, ha="left", fontsize=7, color="#666666")
    return figure
