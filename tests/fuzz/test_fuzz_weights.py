"""Weights of a checkpoint from hostile headers: the model of its configuration, or one message."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from megatron.checkpoints.manifest import write_record
from megatron.checkpoints.read import load_model
from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from tests.fuzz.settings import fuzzed, in_time, works_or_says_why

VOCAB = 8
SHAPE = ["num_layers=1", "hidden_size=4", "num_attention_heads=1", "seq_length=8"]
CONFIG = load([], [*SHAPE, "pos_emb=mep_param"])
RECORD = {"step": 1, "config_hash": CONFIG.hash, "vocab": VOCAB, "files": {}}
WHOLE = save(from_config(CONFIG, vocab=VOCAB).state_dict())
START = 8 + struct.unpack("<Q", WHOLE[:8])[0]
HEADER = json.loads(WHOLE[8:START])
CONTENT = WHOLE[START:]

NUMBERS = st.one_of(st.integers(-9, 999), st.sampled_from([2**31, 2**63 - 1, 2**64 - 1, 2**70]))
DTYPES = st.sampled_from(
    ["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I8", "BOOL", "F4", "x", 7]
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": DTYPES,
        "shape": st.lists(NUMBERS, max_size=4),
        "data_offsets": st.lists(NUMBERS, max_size=3),
        "more": st.just("x"),
    },
)
NAMES = st.sampled_from([*sorted(HEADER), "another", "__metadata__"])


def place(folder, content):
    """A checkpoint with these weights, whose record does not list them."""
    (folder / "model.safetensors").write_bytes(content)
    write_record(folder, RECORD)


def loaded(folder, content):
    place(folder, content)
    works_or_says_why(lambda: load_model(folder, CONFIG, RECORD))


def packed(header, content=CONTENT):
    return struct.pack("<Q", len(header)) + header + content


@fuzzed
@given(
    changes=st.dictionaries(NAMES, CHANGES, max_size=3),
    removed=st.sets(NAMES, max_size=1),
    length=st.sampled_from([len(CONTENT), 100, 0]),
)
def test_a_header_of_any_entries(tmp_path, changes, removed, length):
    header = {name: dict(entry) for name, entry in HEADER.items() if name not in removed}
    for name, change in changes.items():
        header[name] = header.get(name, {}) | change
    loaded(tmp_path, packed(json.dumps(header).encode(), CONTENT[:length]))


def test_a_hostile_header_is_refused(tmp_path):
    for content in (
        packed(b"[" * 100_000 + b"]" * 100_000),
        packed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        struct.pack("<Q", 2**64 - 1) + b"{}",
        b"",
    ):
        place(tmp_path, content)
        refused = pytest.raises(UserError, match=r"model\.safetensors: cannot be read")
        with in_time(5), refused:
            load_model(tmp_path, CONFIG, RECORD)
