"""Rotary options from the keys of a Hugging Face config.json, and back."""

import math
from collections.abc import Mapping
from typing import Any

from megatron.errors import UserError

BASE, SHARE = "rope_theta", "partial_rotary_factor"
OLD_KEYS = {"rotary_emb_base": BASE, "rotary_pct": SHARE}
KEYS = {"rope_parameters", "rope_scaling", BASE, SHARE, *OLD_KEYS}
"""Keys of config.json that `options` reads, old and new spellings."""
ORIGINAL = "original_max_position_embeddings"
OWN_LENGTH = {ORIGINAL: "original_length"}
SCALINGS: dict[str, dict[str, str]] = {  # rope_type -> {their key: our option}
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **OWN_LENGTH,
    },
    "yarn": {
        "factor": "factor",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        **OWN_LENGTH,
    },
}
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
MSCALE = ("mscale", "mscale_all_dim")  # another way to give YaRN's attention_factor
WITHOUT_EFFECT = {"finetuned"}  # how YaRN's own files say that the model was trained with it
PLAIN = {"rope_type", "type", BASE, SHARE}


def options(
    config: Mapping[str, Any], *, default_share: float, default_base: float
) -> dict[str, Any]:
    """pos_emb_args of `rotary` from config.json.

    default_share, default_base: the part of head_dim that turns and the base, where the file does
    not say them
    UserError, which names the key, for a scaling that rotary cannot express.
    """
    given = _parameters(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    base, share = given.get(BASE, default_base), given.get(SHARE, default_share)
    found: dict[str, Any] = {"base": base, "rotary_pct": share}
    if kind == "default":
        _refuse_unknown(given, PLAIN | {ORIGINAL})
        return found
    if kind not in SCALINGS:
        known = ", ".join(["default", *SCALINGS])
        raise UserError(f"rope_type: {kind!r} is not offered; open a model with one of {known}")
    names = SCALINGS[kind]
    _refuse_unknown(given, PLAIN | names.keys() | {ORIGINAL} | set(MSCALE) | WITHOUT_EFFECT)
    for key in REQUIRED[kind]:
        if key not in given:
            raise UserError(f"rope_parameters.{key}: is missing, and rope_type {kind} needs it")
    found["scaling"] = kind
    if ORIGINAL in names:
        length = config.get("max_position_embeddings")
        given[ORIGINAL] = config.get(ORIGINAL) or given.get(ORIGINAL) or length
    if kind == "yarn":
        _complete_yarn(given)
    for theirs, ours in names.items():
        if given.get(theirs) is not None:
            found[ours] = given[theirs]
    return found


def parameters(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of config.json from pos_emb_args of `rotary`.

    UserError for options that Hugging Face's classes do not compute.
    """
    kind = chosen.get("scaling", "none")
    if kind != "none" and kind not in SCALINGS:
        raise UserError(f"pos_emb_args.scaling: {kind} is none of Hugging Face's")
    for option, plain in {"fraction": 1.0, "resonance": False}.items():
        if chosen.get(option, plain) != plain:
            raise UserError(f"pos_emb_args.{option}: {chosen[option]} is none of Hugging Face's")
    if chosen.get("interleaved"):
        raise UserError("pos_emb_args.interleaved: true is not what this class computes")
    found: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        BASE: chosen.get("base", 10000.0),
        SHARE: chosen.get("rotary_pct", 1.0),
    }
    for theirs, ours in SCALINGS.get(kind, {}).items():
        if chosen.get(ours) is not None:
            found[theirs] = chosen[ours]
    return found


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """All that config.json says of the rotation, in the newest spelling; the inner keys win."""
    inner = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(inner, dict):
        raise UserError(f"rope_parameters: {inner!r} is not a mapping")
    outer = {}
    for old, new in OLD_KEYS.items():
        if old in config:
            outer[new] = config[old]
    for key in (BASE, SHARE):
        if key in config:
            outer[key] = config[key]
    given = {**outer, **inner}
    return {key: value for key, value in given.items() if value is not None}


def _refuse_unknown(given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UserError(f"rope_parameters.{unknown[0]}: {given[unknown[0]]!r} is not offered")


def _complete_yarn(given: dict[str, Any]) -> None:
    """Fill in attention_factor where other keys give it."""
    scales = [given.get(key) for key in MSCALE]
    if given.get("attention_factor") is None and all(scales):
        above, below = (_mscale(given["factor"], scale) for scale in scales)
        given["attention_factor"] = above / below


def _mscale(factor: float, scale: Any) -> float:
    """YaRN's 0.1 · scale · ln(factor) + 1, as DeepSeek generalised it."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
