"""Rows as evaluate.py writes them, as far as tables, labels and comparisons need them."""

import math

import numpy as np

from megatron.results.comparison import compared
from megatron.results.labels import kinds


def rows(pos_emb, perplexities, **facts):
    """One row for each length: {length: perplexity}; each scores the same 8,192 tokens."""
    shared = {
        "pos_emb": pos_emb,
        "step": 2000,
        "config_hash": "ab12cd34ef56",
        "train_length": 512,
        "corpus": "stdlib",
        "part": "valid",
        "protocol": "equal_tokens",
        "seed": 1234,
    }
    found = []
    for length, perplexity in perplexities.items():
        loss = None if perplexity is None else math.log(perplexity)
        numbers = {"length": length, "windows": 8192 // length, "tokens": 8192, "loss": loss}
        found.append({**shared, **numbers, "perplexity": perplexity, **facts})
    return found


TWO = rows("mep_free", {512: 12.314, 1024: 12.1}) + rows(
    "rotary", {512: 12.4, 1024: 351.26}, config_hash="0123456789ab"
)


def answers(pos_emb, shares, **facts):
    """Rows of a task: {length: share of right tokens, or (that, share of whole answers)}."""
    found = []
    for length, share in shares.items():
        of_tokens, of_answers = share if isinstance(share, tuple) else (share, share)
        refused = of_tokens is None
        numbers = {"token_accuracy": of_tokens, "accuracy": of_answers, "windows": 256}
        numbers |= {"tokens": 1024, "text": str(length), "corpus": "task:copy", "protocol": "task"}
        found += rows(pos_emb, {length: None if refused else 2.0}, **numbers | facts)
    return found


def with_bytes(found, size, way="tokenizer"):
    """The rows, with the bytes of their text and the bits that each needs."""
    for one in found:
        bits = one["loss"] * one["tokens"] / (math.log(2) * size)
        one |= {"bytes": size, "bytes_from": way, "bits_per_byte": bits}
    return found


# --- Losses of windows and blocks ---


def row(pos_emb, losses, seed=1, **more):
    """A row with these losses of windows of 512."""
    losses = np.asarray(losses)
    loss = float(losses.mean())
    facts = {
        "config_hash": f"{pos_emb}{seed}",
        "seed": seed,
        "checkpoint": f"runs/{pos_emb}-{seed}",
        "text": "ab12",
        "windows": len(losses),
        "tokens": 512 * len(losses),
        "loss": loss,
        "window_losses": losses.tolist(),
    }
    (found,) = rows(pos_emb, {512: float(np.exp(loss))}, **facts | more)
    return found


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
    return compared(kinds(rows), name)


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
