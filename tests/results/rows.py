"""Rows as evaluate.py writes them, as far as tables and labels need them."""

import math


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
