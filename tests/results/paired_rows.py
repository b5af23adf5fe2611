"""Rows of made-up losses, as evaluate.py writes them, for tests of comparisons."""

import numpy as np

from megatron.results.comparison import compared, encodings


def row(pos_emb, losses, seed=1, **more):
    """A row with these losses of windows of 512."""
    losses = np.asarray(losses)
    loss = float(losses.mean())
    facts = {
        "pos_emb": pos_emb,
        "config_hash": f"{pos_emb}{seed}",
        "step": 10,
        "seed": seed,
        "corpus": "stdlib",
        "part": "valid",
        "protocol": "equal_tokens",
        "checkpoint": f"runs/{pos_emb}-{seed}",
        "text": "ab12",
        "length": 512,
        "windows": len(losses),
        "tokens": 512 * len(losses),
        "loss": loss,
        "perplexity": float(np.exp(loss)),
        "window_losses": losses.tolist(),
    }
    return facts | more


def row_of_blocks(pos_emb, losses, seed=1, **more):
    """A row with the losses of blocks [windows, blocks of a window], of windows that long."""
    losses = np.asarray(losses)
    windows, in_window = losses.shape
    length = 512 * in_window
    facts = {
        "length": length,
        "tokens": windows * length,
        "block_losses": losses.ravel().tolist(),
    }
    return row(pos_emb, losses.mean(axis=1), seed, **facts | more)


def against(rows, name=None):
    """Comparisons of rows with the encoding of that name, or the first."""
    return compared(encodings(rows), name)


def texts(n=64, seed=0):
    """Losses of windows of a text, some much harder than others."""
    return 3 + 0.5 * np.random.default_rng(seed).standard_normal(n)


def seeds_of(name, differences, noise=0.0, **more):
    """A row for each seed from 1 on: the losses of `texts`, and a difference in every window."""
    rows = []
    for seed, difference in enumerate(differences, start=1):
        losses = texts() + difference
        if noise:
            generator = np.random.default_rng([seed, *name.encode()])
            losses += noise * generator.standard_normal(64)
        rows.append(row(name, losses, seed, **more))
    return rows
