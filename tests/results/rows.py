"""Rows as evaluate.py writes them, as far as tables, labels and comparisons need them."""

import math

import numpy as np
import pytest

from megatron.results.comparison import compared
from megatron.results.labels import kinds


def rows(pos_emb, perplexities, **facts):
    """A row for each length: {length: perplexity}; each scores the same 8,192 tokens."""
    shared = {
        "pos_emb": pos_emb,
        "step": 2000,
        "config_hash": "ab12cd34ef56",
        "train_length": 512,
        "corpus": "stdlib",
        "part": "valid",
        "protocol": "equal_tokens",
        "seed": 1234,
        "tokens": 8192,
    }
    measured = []
    for length, perplexity in perplexities.items():
        loss = None if perplexity is None else math.log(perplexity)
        numbers = {"length": length, "windows": 8192 // length, "loss": loss}
        row = {**shared, **numbers, "perplexity": perplexity, **facts}
        measured.append({"region": row.get("text", str(row["tokens"])), **row})
    return measured


TWO = rows("mep_free", {512: 12.314, 1024: 12.1}) + rows(
    "rotary", {512: 12.4, 1024: 351.26}, config_hash="0123456789ab"
)


def row_at_512(pos_emb="rotary", **facts):
    return rows(pos_emb, {512: 9.0}, **facts)[0]


def answers(pos_emb, shares, **facts):
    """Rows of a task: {length: share of right tokens, or (that, share of whole answers)}."""
    measured = []
    for length, share in shares.items():
        token_share, answer_share = share if isinstance(share, tuple) else (share, share)
        numbers = {"token_accuracy": token_share, "accuracy": answer_share, "windows": 256}
        numbers |= {"tokens": 1024, "text": str(length), "corpus": "task:copy", "protocol": "task"}
        perplexity = None if token_share is None else 2.0
        measured += rows(pos_emb, {length: perplexity}, **numbers | facts)
    return measured


def with_bytes(rows, size, way="tokenizer"):
    """The rows, with the bytes of their text and the bits that each needs."""
    for row in rows:
        bits = row["loss"] * row["tokens"] / (math.log(2) * size)
        row |= {"bytes": size, "bytes_from": way, "bits_per_byte": bits}
    return rows


def check_numbers(row):
    """Assert that numbers of a written row that say the same thing agree."""
    first = row.get("tail") or row["length"]
    scored = first + (row["windows"] - 1) * (row.get("tail") or row.get("stride") or row["length"])
    if row["protocol"] == "task":  # answers alone are scored, at least a token of each
        assert row["windows"] <= row["tokens"] <= scored
    else:
        assert row.get("all_tokens", row["tokens"]) == scored
        assert row["tokens"] <= scored
    if row["loss"] is None:
        return
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    blocks = row.get("block_losses") or []
    for key, weights in (
        ("window_losses", row.get("window_tokens")),
        ("block_losses", row.get("block_tokens") or [512] * len(blocks)),
        ("position_losses", np.diff(row.get("position_edges") or [0])),
    ):
        if losses := row.get(key):  # written with six digits
            assert np.average(losses, weights=weights) == pytest.approx(row["loss"], abs=2e-6), key
    if shares := row.get("window_accuracies"):
        assert row["accuracy"] * len(shares) == pytest.approx(shares.count(1), abs=0.01)
        assert 0 <= min(shares) <= max(shares) <= 1


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
        "perplexity": math.exp(loss),
    }
    return row_at_512(pos_emb, **facts | more)


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
