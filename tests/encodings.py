"""The encodings that a test of the model runs over: one of each signature of hooks.

The model knows hooks and no names (tests/test_repository.py holds it), so what it does with one
encoding it does with every other of the same signature. Among those of one signature a seed draws;
ENCODINGS_SEED=N, which `make fuzz` sets, draws others.
"""

import os
import random
from collections import defaultdict

import pytest

from megatron.positions import REGISTRY
from megatron.positions.base import Position

HOOKS = (
    "prepare",
    "on_embeddings",
    "on_embeddings_by_ids",
    "on_queries_keys",
    "on_queries_keys_at",
    "on_queries_keys_by_content",
    "distance_bias",
    "distance_weight",
    "score_scale",
    "index_bias",
    "score_bias",
    "block_scores",
    "on_scores",
)
TRAITS = ("per_layer", "grouped_queries", "heads_per_query", "score_width")


def signature(name: str) -> tuple[object, ...]:
    """The hooks that an encoding overrides, and the traits of its class that the model reads."""
    encoding = REGISTRY[name]
    hooks = [hook for hook in HOOKS if getattr(encoding, hook) is not getattr(Position, hook)]
    return (*hooks, *(getattr(encoding, trait) for trait in TRAITS))


def one_of_each_signature() -> list[str]:
    """Names of encodings that together override every combination of hooks in the registry."""
    names = defaultdict(list)
    for name in sorted(REGISTRY):
        names[signature(name)].append(name)
    draw = random.Random(int(os.environ.get("ENCODINGS_SEED", "0")))
    return sorted(draw.choice(alike) for alike in names.values())


def one_of_each_hook() -> list[str]:
    """Some of SAMPLE: beside `sum`, which has all hooks, each hook and trait at least once."""
    missing = set().union(*map(signature, SAMPLE))
    names = ["sum"]
    for name in sorted(SAMPLE, key=lambda name: len(signature(name))):
        if name != "sum" and missing & {*signature(name)}:
            names.append(name)
            missing -= {*signature(name)}
    return names


SAMPLE = one_of_each_signature()
FEW = one_of_each_hook()
every_signature = pytest.mark.parametrize("name", SAMPLE)
every_hook = pytest.mark.parametrize("name", FEW)
