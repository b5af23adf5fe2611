"""What single layers are built from."""

import json

from megatron.config import load
from megatron.model import Architecture


def architecture(**keys) -> Architecture:
    """That of a small model with these keys of YAML."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 64}
    words = [f"{key}={json.dumps(value)}" for key, value in (shape | keys).items()]
    return Architecture.of(load([], words).model)
