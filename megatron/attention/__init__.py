"""Causal attention with a bias by head and distance, or with any encoding."""

# ruff: noqa: F401
from megatron.attention.backends import (
    BACKENDS,
    COMPUTED,
    FAULTS,
    KERNELS,
    TRUSTED,
    Backend,
    Choice,
    attend,
    attention,
    choose,
    joined,
)
from megatron.attention.encoded import LayerCache, encoded, prepare
from megatron.attention.flex import flex
from megatron.attention.terms import with_sink
