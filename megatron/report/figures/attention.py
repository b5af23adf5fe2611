"""Attention of a real text by layer and head, as in figure 2 of MEP (arXiv 2403.17698)."""

from collections.abc import Sequence

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from megatron.report.figures.positions import GREY, style

LOWEST = 1e-3  # probabilities below look the same
MANY = 6  # layers or heads, from which on they have numbers alone
LAYOUT = "layers downward, heads to the right; in each map queries downward, keys to the right"


def draw_attention(
    probabilities: Tensor, title: str, text: str = "", names: Sequence[str] = ()
) -> Figure:
    """A map for each layer and head on a logarithmic scale: [layers, heads, length, length].

    names: of the layers' encodings, where they differ

    Layers stand downward, heads to the right; in a map queries downward, keys to the right.
    """
    layers, heads, length, _ = probabilities.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    shown = probabilities.clamp(min=LOWEST).masked_fill(future, float("nan"))
    side = max(0.58, min(1.6, 7.2 / heads))
    with style():
        size = (side * heads + 1.3, side * layers + 0.8)
        figure = Figure(figsize=size, layout="constrained")
        places = figure.subplots(layers, heads, squeeze=False)
        look = {"norm": LogNorm(LOWEST, 1), "cmap": "viridis", "interpolation": "nearest"}
        images = []
        for layer in range(layers):
            for head in range(heads):
                axes = places[layer, head]
                images.append(axes.imshow(shown[layer, head].numpy(), **look))
                axes.set_xticks([])
                axes.set_yticks([])
                axes.spines[:].set_visible(False)
        for head in range(heads):
            places[0, head].set_title(_numbered("head", head, heads), fontsize=8, pad=2)
        for layer in range(layers):
            label = _numbered("layer", layer, layers)
            if names:
                label = f"{label}\n{names[layer]}"
            places[layer, 0].set_ylabel(label, fontsize=8, labelpad=2)
        bar = figure.colorbar(
            images[-1], ax=places, pad=0.01, aspect=30, shrink=0.9, label="attention probability"
        )
        bar.set_ticks([1, 0.1, 0.01, LOWEST], labels=["1", "0.1", "0.01", f"≤ {LOWEST:g}"])
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        source = f"{length} tokens: {text}" if text else f"{length} tokens"
        footer = f"{LAYOUT}\n{source}"
        figure.supxlabel(footer, x=0.01, ha="left", fontsize=7, color=GREY)
    return figure


def _numbered(name: str, number: int, count: int) -> str:
    return f"{name} {number}" if count <= MANY else str(number)
