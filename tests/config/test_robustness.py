"""Whatever is given, the answer is a configuration or one message, never a traceback."""

import contextlib

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.config import Config, load
from megatron.config.keys import all_keys
from megatron.config.legacy import NAMES
from megatron.config.read import read_overrides
from megatron.errors import UserError

TINY = [
    "num_layers=2",
    "hidden_size=72",
    "num_attention_heads=12",
    "seq_length=64",
    "max_position_embeddings=64",
]

keys = st.sampled_from(
    sorted(
        [key.name for key in all_keys()] + sorted(NAMES) + ["optimizer", "fp16", "optimizer.params"]
    )
)
plain = (
    st.none() | st.booleans() | st.integers(-3, 2000) | st.floats(width=16) | st.text(max_size=4)
)
words = st.sampled_from(
    ["enabled", "type", "stage", "lr", "bfloat16", "rotary", "mep", "kernels", "0x1f", "1e-3", ""]
)
values = st.recursive(
    plain | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, values, max_size=4))
@example({"pos_emb_file": False, "pos_emb": []})  # found once, and rarely drawn
def test_any_value_of_any_key_loads_or_is_a_fault(drawn):
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in drawn.items()
    ]
    with contextlib.suppress(UserError):
        config = load([], [*TINY, *overrides])
        assert isinstance(config, Config)
        assert len(config.hash) == 12


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=3))
def test_any_word_is_read_or_complained_about(drawn):
    complaints = []
    assert isinstance(read_overrides(drawn, complaints.append), dict)
