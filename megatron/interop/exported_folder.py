"""The folder of our own exported class: its config.json from a configuration, and back.

Reading runs none of its code. The names of the weights are ours.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config, load
from megatron.config.config import plain
from megatron.config.keys import all_keys, file_names
from megatron.config.user_file import COPY, KEY
from megatron.errors import UserError
from megatron.interop.huggingface import SETTINGS, check_memory, read_json, read_tensors
from megatron.model import GPT, Architecture, from_config, options_of_entry
from megatron.positions import FILES, fingerprint
from megatron.positions.layers import entries_of

MODEL_TYPE = "positions_gpt"
ARCHITECTURE = "PositionsGPTForCausalLM"
CLASSES = {
    "AutoConfig": "configuration_positions_gpt.PositionsGPTConfig",
    "AutoModelForCausalLM": f"modeling_positions_gpt.{ARCHITECTURE}",
}
CODE = ("architectures", "auto_map")  # keys about code, which is not run here
SHAPING_SECTIONS = ("model", "position", "attention")


def keys_of(config: Config, model: GPT) -> dict[str, Any]:
    """config.json for our own class, without what is known of the training."""
    sizes = Architecture.of(config.model)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "auto_map": CLASSES,
        "vocab_size": model.vocab,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.key_heads,
        "head_dim": sizes.features_of_head,
        "intermediate_size": sizes.mlp_width,
        "max_position_embeddings": config.model.max_position_embeddings,
        "train_length": sizes.seq_length,
        "norm": sizes.norm,
        "layernorm_epsilon": sizes.layernorm_epsilon,
        "qk_norm": sizes.qk_norm,
        "activation": sizes.activation,
        "parallel_residual": sizes.parallel_residual,
        "use_bias_in_norms": sizes.use_bias_in_norms,
        "use_bias_in_attn_linear": sizes.use_bias_in_attn_linear,
        "use_bias_in_attn_output": sizes.bias_in_attn_output,
        "use_bias_in_mlp": sizes.use_bias_in_mlp,
        "hidden_dropout": sizes.hidden_dropout,
        "initializer_range": sizes.init_method_std,
        "tie_word_embeddings": not sizes.no_weight_tying,
        **_encodings_of(config, model),
        "blockwise": model.blockwise,
        "logn_scale": model.logn_scale,
        "paper_precision": config.attention.paper_precision,
    }


def _encodings_of(config: Config, model: GPT) -> dict[str, Any]:
    """The keys that say which encoding and which window each layer has."""
    entries = entries_of(config.position)
    of_models = []
    for placed in model.placed:
        entry = entries[placed.layers[0] % len(entries)]
        of_models.append({entry.name: plain(options_of_entry(config, entry))})
    differ = bool(config.position.pos_emb_layers)
    [(name, options)] = of_models[0].items()
    return {
        "pos_emb": None if differ else name,
        "pos_emb_args": None if differ else options,
        "pos_emb_shared": len(model.positions) == 1,
        "encodings": of_models if differ else None,
        "encoding_of_layer": model.position_of_layer if differ else None,
        "window": None if config.attention.window_layers else model.window,
        "window_layers": model.windows if config.attention.window_layers else None,
    }


def training_of(config: Config, record: Mapping[str, Any], same_tokenizer: bool) -> dict[str, Any]:
    """What is known of the training, for config.json: `step`, `tokenizer` and `keys`.

    record: checkpoint.json; same_tokenizer: whether the folder holds the very file, or none
    The keys are those that shaped the result. Of a path only the file's name is kept.
    """
    keys = {}
    for key in all_keys():
        if not key.shapes_result and key.section not in SHAPING_SECTIONS:
            continue
        value = plain(config[key.name])
        if key.names_input and value is not None:
            value = file_names(value)
        keys[key.name] = value
    if config.pos_emb_code is not None:
        keys[KEY] = fingerprint(config.pos_emb_code)
    tokenizer = (record.get("tokenizer") or {}) if same_tokenizer else {}
    return {"step": record["step"], "tokenizer": tokenizer, "keys": keys}


def is_folder(folder: Path) -> bool:
    """Whether a folder holds our own exported class."""
    place = folder / SETTINGS
    try:
        return place.is_file() and read_json(place).get("model_type") == MODEL_TYPE
    except UserError:
        return False


def open_folder(folder: Path) -> tuple[GPT, Config, int, dict[str, Any]]:
    """The model in float32 and eval mode, the configuration of its training, its step and facts.

    The facts are entries of checkpoint.json.
    UserError where the folder is damaged, or where its encoding is that of a user's file which the
    user has not named.
    """
    place = folder / SETTINGS
    settings = read_json(place)
    training: Any = settings.get("training")
    vocab = settings.get("vocab_size")
    if not _is_training(training) or type(vocab) is not int or vocab < 1:
        raise UserError(
            f"{place}: has no vocab_size, or does not say how the model was trained - export the"
            " model again"
        )
    config = _configuration(training["keys"], folder)
    check_memory(folder, config, vocab)
    model = from_config(config, vocab, training["tokenizer"].get("eod"))
    for key, value in keys_of(config, model).items():
        if key not in CODE and settings.get(key, value) != value:
            raise UserError(
                f"{place}: {key} is {settings[key]!r}, its training had {value!r} - export the"
                " model again"
            )
    try:
        model.load_state_dict(read_tensors(folder))
    except RuntimeError as fault:
        raise UserError(
            f"{folder}: the weights are not those of its config.json ({fault}) - copy the folder"
            " again"
        ) from None
    return model.eval(), config, training["step"], {"tokenizer": training["tokenizer"]}


def _is_training(value: Any) -> bool:
    """Whether this is what `training_of` writes, as far as its kinds go."""
    if not isinstance(value, dict) or type(value.get("step")) is not int or value["step"] < 0:
        return False
    return isinstance(value.get("keys"), dict) and isinstance(value.get("tokenizer"), dict)


def _configuration(keys: Mapping[str, Any], folder: Path) -> Config:
    """The configuration from the keys that `training_of` wrote."""
    given = dict(keys)
    code = given.pop(KEY, None)
    if code is not None:
        if code not in FILES:
            raise UserError(
                f"{KEY}: {folder / COPY} defines this model's encoding; code that lies in a model's"
                f" folder is not run unasked: read it, then write {KEY}={folder / COPY} on the"
                f" command line (to a tool --from {folder / COPY})"
            )
        given[KEY] = FILES[code]
    try:
        return load([], [f"{key}={json.dumps(value)}" for key, value in given.items()])
    except UserError as fault:
        raise UserError(f"{folder / SETTINGS}: {fault}") from None
