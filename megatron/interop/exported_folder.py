"""The folder of our own exported class: its config.json from a configuration, and back.

Reading runs none of its code. The names of the weights are ours.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.config import Config, load
from megatron.config.config import COPY
from megatron.config.load import USER_FILE
from megatron.config.schema import plain
from megatron.errors import UserError
from megatron.interop.huggingface import SETTINGS, check_memory, read_json, read_tensors
from megatron.model import GPT, Architecture, AttentionSettings, from_config, options_of_entry
from megatron.model.settings import ONLY_MEASURED
from megatron.positions import FILES, fingerprint
from megatron.positions.layers import entries_of

MODEL_TYPE = "positions_gpt"
ARCHITECTURE = "PositionsGPTForCausalLM"
CLASSES = {
    "AutoConfig": "modeling_positions_gpt.PositionsGPTConfig",
    "AutoModelForCausalLM": f"modeling_positions_gpt.{ARCHITECTURE}",
}
PREFIX = "gpt."  # of the names of weights, but in folders of earlier versions
NOT_KEPT = ("attention_backend", "attention_self_check", *ONLY_MEASURED)
"""Settings of attention that change no number, or are those of a measurement."""


def keys_of(config: Config, model: GPT, training: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for our own class. training: facts about it, beside its keys"""
    architecture = Architecture.of(config.model)
    attention = asdict(AttentionSettings.of(config.attention).of_one_document())
    entries = entries_of(config.position)
    encodings = []
    for placed in model.placed:
        entry = entries[placed.layers[0] % len(entries)]
        encodings.append({entry.name: plain(options_of_entry(config, entry))})
    keys = config.model_keys() | plain(config.attention)
    if config.pos_emb_code is not None:
        keys[USER_FILE] = fingerprint(config.pos_emb_code)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "auto_map": CLASSES,
        "vocab_size": model.vocab,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "max_position_embeddings": config.model.max_position_embeddings,
        "architecture": asdict(architecture),
        "attention_settings": {
            name: plain(value) for name, value in attention.items() if name not in NOT_KEPT
        },
        "encodings": encodings,
        "encoding_of_layer": model.position_of_layer,
        "training": {**training, "keys": keys},
    }


def is_folder(folder: Path) -> bool:
    """Whether a folder with a config.json holds our own exported class."""
    try:
        return read_json(folder / SETTINGS).get("model_type") == MODEL_TYPE
    except UserError:
        return False


def open_folder(folder: Path) -> tuple[GPT, Config, int, dict[str, Any]]:
    """The model in float32 and eval mode, the configuration of its training, its step and facts.

    The facts are entries of checkpoint.json.
    Raises UserError if the folder is damaged, or its encoding is that of a user's file which the
    user has not named.
    """
    place = folder / SETTINGS
    settings = read_json(place)
    training: Any = settings.get("training")
    vocab = settings.get("vocab_size")
    kinds = {"step": int, "tokenizer": dict, "keys": dict}
    is_training = isinstance(training, dict) and all(
        type(training.get(key)) is kind for key, kind in kinds.items()
    )
    if not is_training or type(vocab) is not int or vocab < 1:
        raise UserError(
            f"{place}: has no vocab_size, or does not say how the model was trained - export the"
            " model again"
        )
    given = dict(training["keys"])
    code = given.pop(USER_FILE, None)
    if code is not None:
        if code not in FILES:
            raise UserError(
                f"{USER_FILE}: {folder / COPY} defines this model's encoding; code that lies in a"
                f" model's folder is not run unasked: read it, then write"
                f" {USER_FILE}={folder / COPY} on the command line (to a tool --from"
                f" {folder / COPY})"
            )
        given[USER_FILE] = FILES[code]
    try:
        config = load([], [f"{key}={json.dumps(value)}" for key, value in given.items()])
    except UserError as fault:
        raise UserError(f"{place}: {fault}") from None
    check_memory(folder, config, vocab)
    model = from_config(config, vocab, training["tokenizer"].get("eod"))
    try:
        weights = read_tensors(folder).items()
        model.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in weights})
    except RuntimeError as fault:
        raise UserError(
            f"{folder}: the weights are not those of its config.json ({fault}) - copy the folder"
            " again"
        ) from None
    return model.eval(), config, training["step"], {"tokenizer": training["tokenizer"]}
