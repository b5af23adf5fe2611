"""Spellings of GPT-NeoX, KERPLE, MEP and DAPE: what each one means here, or why it has no effect.

legacy.yml lists everything that needs no computation.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from megatron.config.messages import Report, contradiction, no_such_key
from megatron.config.schema import as_list
from megatron.positions import ALIASES

SPELLINGS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
)
RENAMED: dict[str, str] = SPELLINGS["renamed"]
VALUES: dict[str, dict[str, str]] = SPELLINGS["values"]
NO_EFFECT = {key: why for why, keys in SPELLINGS["no_effect"].items() for key in keys}
OFF = {key: why for why, keys in SPELLINGS["must_be_off"].items() for key in keys}
ELSEWHERE = {key: spelling for spelling, keys in SPELLINGS["elsewhere"].items() for key in keys}
AFTER_MERGE: dict[str, str] = SPELLINGS["after_merge"]
OPTIONS: dict[str, str] = SPELLINGS["options"]
OLD = (*RENAMED, *NO_EFFECT, *OFF, *AFTER_MERGE, "bf16", "attention_config")
NAMES = {key for key in OLD if "." not in key}
"""Every old key, which is not in today's schema."""
CORPORA = ("train_data_paths", "valid_data_paths", "test_data_paths")  # lists of prefixes
FULL_ATTENTION = {"global", "flash", "all"}  # words of attention_config
GATED = ("swiglu", "geglu", "geglu_new")  # activations
ABSENT = object()
SWITCHES = ("bf16.enabled", "bf16.type", "fp16.enabled", "fp16.type")
"""Keys inside a mapping that choose the precision."""


def _pop(settings: dict[str, Any], key: str) -> Any:
    """Remove a (dotted) key and return its value, or ABSENT if it is not set."""
    *parents, name = key.split(".")
    for parent in parents:
        settings = settings.get(parent, {})
        if not isinstance(settings, dict):
            return ABSENT
    return settings.pop(name, ABSENT)


def translate(source: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """One source in today's spelling, so that a later source wins whatever its spelling."""
    settings = deepcopy(dict(source))
    for old, new in RENAMED.items():
        value = _pop(settings, old)
        if value is not ABSENT and settings.setdefault(new, value) != value:
            report.fault(contradiction(f"{new}: {settings[new]}", f"{old}: {value}"))
    for key, spellings in VALUES.items():
        value = settings.get(key)
        if isinstance(value, str) and value in spellings:
            settings[key] = spellings[value]
            if value in SPELLINGS["notes"]:
                report.note(f"{key}: {value} means {settings[key]}; {SPELLINGS['notes'][value]}")
    if settings.get("model_parallel_size") == 1:  # as in most files of GPT-NeoX
        del settings["model_parallel_size"]
    for key, why in (NO_EFFECT | OFF).items():
        value = _pop(settings, key)
        if value is not ABSENT and value and key in OFF:
            report.fault(f"{key}: {why}; set it to false or remove it")
        elif value is not ABSENT:
            report.no_effect(key, "it is off" if key in OFF else why)
    for key, spelling in ELSEWHERE.items():
        if _pop(settings, key) is not ABSENT:
            report.fault(f"{key}: no such key; write {spelling}")
    _precision(settings, report)

    # One corpus for training, validation and test, as in the files of Pythia.
    paths = [settings.get(key) for key in CORPORA]
    corpora = {str(path) for value in paths for path in as_list(value)}
    if None not in paths and len(corpora) == 1:
        for key in CORPORA:
            settings.pop(key)
            settings.pop(key.replace("paths", "weights"), None)
        settings["data_path"] = corpora.pop()
        report.note(
            f"{', '.join(CORPORA)}: means data_path, which split divides into parts; GPT-NeoX"
            " would validate on the training text"
        )

    if "attention_config" in settings:
        value = settings.pop("attention_config")
        kinds = set(re.findall(r"\w*[a-z]\w*", str(value)))
        if kinds and kinds <= FULL_ATTENTION:
            report.no_effect("attention_config", "global and flash are full attention")
        else:
            report.fault(
                f"attention_config: {value} is not supported, only global and flash, which need no"
                " key here; for layers with windows write window_layers: [256, null]"
            )

    name = settings.get("pos_emb")
    published = SPELLINGS["encodings"]
    if isinstance(name, str) and (name in published or name in ALIASES):
        meaning = published.get(name) or {ALIASES[name]: {}}
        if isinstance(meaning, str):
            del settings["pos_emb"]
            report.fault(f"pos_emb: {name}: {meaning}")
            return settings
        [(encoding, options)] = meaning.items()
        settings["pos_emb"] = encoding
        args = settings.get("pos_emb_args", {})
        note = f"pos_emb: {name} means {encoding}"
        if options:
            note += f" with {_listed(options)}"
            if isinstance(args, dict):
                settings["pos_emb_args"] = options | dict(args)
        hidden = SPELLINGS["notes"].get(name)
        report.note(f"{note}; {hidden}" if hidden else note)
    return settings


def _precision(settings: dict[str, Any], report: Report) -> None:
    """Turn all older ways to choose a precision into `precision`; `fp16` keeps the loss scaling."""
    chosen = {}  # precision by the setting that chooses it
    off = ""
    if isinstance(settings.get("precision"), str):
        word = settings.pop("precision")
        chosen[f"precision: {word}"] = word
    for key in ("bf16", "fp16"):
        switch = settings.pop(key, {})
        if not isinstance(switch, dict):
            switch = {"enabled": switch}
        kind = str(switch.pop("type", ""))
        older = switch.pop(key, True if kind else None)  # fp16: {fp16: true}, {type: bfloat16}
        enabled = switch.pop("enabled", older)
        meaning = VALUES["precision"].get(kind, kind) or key
        if switch and key == "fp16":
            settings[key] = switch
        elif switch:
            report.fault(no_such_key(f"{key}.{next(iter(switch))}", SWITCHES))
        if meaning not in ("bf16", "fp16") or enabled not in (None, True, False):
            got = f"got enabled: {enabled}, type: {kind or 'none'}"
            report.fault(f"{key}: takes enabled: true or false, and type: fp16 or bfloat16, {got}")
        elif enabled:
            chosen[f"{key}: {meaning}"] = meaning
        elif enabled is False:
            off = key
    words = set(chosen.values())
    if len(words) > 1:
        report.fault(f"precision: {contradiction(*chosen)}")
    elif words:
        settings["precision"] = words.pop()
        if "fp16: bf16" in chosen:
            report.note("fp16.type: bfloat16 means precision: bf16, as in GPT-NeoX of 2022")
    elif off:
        settings["precision"] = "fp32"
        report.note(f"{off}.enabled: false means precision: fp32")


def _listed(options: Mapping[str, Any]) -> str:
    words = [f"{option}: {value}" for option, value in options.items()]
    return ", ".join(words).replace("False", "false")


def complete_recipe(
    sources: Iterable[Mapping[str, Any]], merged: dict[str, Any], report: Report
) -> None:
    """Give recipes of 2022, such as KERPLE's and MEP's, the learning rate schedule of that time.

    `fp16: {type: bfloat16}` marks such a recipe: later versions of GPT-NeoX don't accept it, and
    none of our files has it.
    """
    halves = [source.get("fp16") for source in sources]
    if not any(isinstance(fp16, dict) and "bf" in str(fp16.get("type")) for fp16 in halves):
        return
    if "lr_schedule" not in merged:
        merged["lr_schedule"] = "neox-2022"
        report.note(
            "lr_schedule: neox-2022 is used because the files are from 2022 (fp16.type: bfloat16);"
            " set lr_schedule: standard for today's schedule"
        )
    if not merged.get("paper_precision"):
        report.note(
            "of 2022: positions, distances, biases and the softmax are float32 here; the forks"
            " rounded them to bfloat16, which paper_precision: true does too, except for the"
            " softmax"
        )


def fold(merged: dict[str, Any], options: set[str], report: Report) -> None:
    """Translate old keys whose meaning depends on other keys; `options`: of the chosen encoding."""
    epsilon = merged.pop("rms_norm_epsilon", None)
    if epsilon is not None and merged.get("norm") == "rmsnorm":
        merged["layernorm_epsilon"] = epsilon
        report.note(f"rms_norm_epsilon: {epsilon} means layernorm_epsilon, because norm is rmsnorm")
    elif epsilon is not None:
        report.no_effect("rms_norm_epsilon", "norm is not rmsnorm")

    multiple, width = merged.pop("mlp_multiple_of", None), merged.get("intermediate_size")
    if isinstance(multiple, int) and isinstance(width, int) and merged.get("activation") in GATED:
        # A gate is a second matrix of this width, so each has two thirds of the usual width.
        half = int(width * 2 / 3) // 2
        merged["intermediate_size"] = -(-half // multiple) * multiple
        report.note(
            f"intermediate_size: {width} with mlp_multiple_of: {multiple} means"
            f" {merged['intermediate_size']}, as GPT-NeoX computes it for gated activations"
        )
    elif multiple is not None:
        report.fault(
            "mlp_multiple_of: needs intermediate_size and a gated activation; set the resulting"
            " intermediate_size instead"
        )

    name = merged.get("pos_emb")
    args = merged.get("pos_emb_args") or {}
    if not isinstance(args, dict):  # reported with the other keys
        return
    args = dict(args)
    for old, option in OPTIONS.items():
        if old not in merged:
            continue
        value = merged.pop(old)
        if old == "noise_seq_length" and isinstance(value, int):
            value //= 2
        if option not in options:
            report.no_effect(old, f"pos_emb {name} has no such option")
        elif args.setdefault(option, value) != value:
            old_setting = f"{old}: {value}"
            setting = f"pos_emb_args.{option}: {args[option]}"
            report.fault(contradiction(old_setting, setting))
    if "alibi_scaling" in merged:
        scaling = merged.pop("alibi_scaling")
        meant = None  # the options that the MEP fork derived from it
        if {"rotary_pct", "base"} <= options:
            # 0 is plain, 1 is NTK-by-parts with factor 1, which is plain, all else is YaRN.
            meant = {} if scaling in (0, 1) else {"scaling": "yarn", "factor": 2.0} | args
        elif {"slope_factor", "normalized"} <= options:
            # A factor of the slopes, where they are ALiBi's: 2^n below 10, n from there on.
            meant = {}
            slope = args.get("slope_factor")
            if isinstance(slope, int | float) and isinstance(scaling, int):
                meant = {"slope_factor": slope * (2**scaling if scaling < 10 else scaling)}
        if meant is None:
            why = f"the MEP fork doesn't use it for {name} either"
            report.no_effect("alibi_scaling", why)
        else:
            args |= meant
            report.note(
                f"alibi_scaling: {scaling} meant {_listed(meant) or f'plain {name}'} in the MEP"
                " fork, and means the same here"
            )
    if args:
        merged["pos_emb_args"] = args
