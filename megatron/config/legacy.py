"""Spellings of GPT-NeoX, KERPLE and MEP: what each means here, or why it has no effect.

legacy.yml lists all that needs no computation.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from megatron.config.messages import Report, contradiction
from megatron.config.schema import as_list
from megatron.config.yaml_files import Nested
from megatron.positions import ALIASES

SPELLINGS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
)
RENAMED: dict[str, str] = SPELLINGS["renamed"]
VALUES: dict[str, dict[str, str]] = SPELLINGS["values"]
NO_EFFECT = {key: why for why, keys in SPELLINGS["no_effect"].items() for key in keys}
OFF = {key: why for why, keys in SPELLINGS["must_be_off"].items() for key in keys}
AFTER_MERGE: dict[str, str] = SPELLINGS["after_merge"]
OPTIONS: dict[str, str] = SPELLINGS["options"]
MEANINGS = {
    name: (encoding, options)
    for name, meaning in SPELLINGS["encodings"].items()
    for encoding, options in meaning.items()
}
NAMES = {
    *(key for key in (*RENAMED, *NO_EFFECT, *OFF, *AFTER_MERGE) if "." not in key),
    "bf16",
    "attention_config",
    "sliding_window_width",
}
"""Every key that is none of today's."""
CORPORA = ("train_data_paths", "valid_data_paths", "test_data_paths")  # lists of prefixes
WINDOWED = ("flash", "local")  # kinds of attention that sliding_window_width acts on
MOST_LAYERS = 1000
SWITCHED_OFF = "_switched_off"
ABSENT = object()


def _pop(given: dict[str, Any], key: str) -> Any:
    """Take away a key, with dots for one inside a mapping; ABSENT if it is not given."""
    *parents, name = key.split(".")
    for parent in parents:
        given = given.get(parent, {})
        if not isinstance(given, dict):
            return ABSENT
    return given.pop(name, ABSENT)


def translate(source: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """One source in today's spelling, so that a later source wins whatever the spelling."""
    given = deepcopy(dict(source))
    for old, new in RENAMED.items():
        value = _pop(given, old)
        if value is not ABSENT and given.setdefault(new, value) != value:
            report.fault(contradiction(f"{new}: {given[new]}", f"{old}: {value}"))
    for key, spellings in VALUES.items():
        if isinstance(given.get(key), str):
            given[key] = spellings.get(given[key], given[key])
    for key, why in NO_EFFECT.items():
        if _pop(given, key) is not ABSENT:
            report.no_effect(key, why)
    for key, why in OFF.items():
        value = _pop(given, key)
        if value is not ABSENT and value:
            report.fault(f"{key}: {why}; set it to false or drop it")
        elif value is not ABSENT:
            report.no_effect(key, "it is off")
    _precision(given, report)
    _attention(given, report)
    _one_corpus(given, report)
    _encoding(given, report)
    return given


def _precision(given: dict[str, Any], report: Report) -> None:
    """All older ways to choose a precision become `precision`; `fp16` keeps the loss scaling."""
    chosen = {}  # precision by the setting that chooses it
    if isinstance(given.get("precision"), str):
        word = given.pop("precision")
        chosen[f"precision: {word}"] = word
    for key in ("bf16", "fp16"):
        switch = given.pop(key, {})
        if isinstance(switch, bool):
            switch = Nested(enabled=switch)
        if not isinstance(switch, dict):
            report.fault(f"{key}: must be a mapping such as {{enabled: true}}, got {switch!r}")
            continue
        older = switch.pop("fp16", None)  # GPT-NeoX's files also write fp16: {fp16: true}
        enabled = switch.pop("enabled", older)
        kind = switch.pop("type", None)
        meaning = VALUES["precision"].get(str(kind), kind) or key
        if switch and key == "fp16":
            given[key] = switch
        if enabled not in (None, True, False):
            report.fault(f"{key}.enabled: must be true or false, got {enabled!r}")
        elif meaning not in ("bf16", "fp16"):
            report.fault(f"{key}.type: must be fp16 or bfloat16, got {kind!r}")
        elif enabled is False:
            given.setdefault(SWITCHED_OFF, []).append(key)
        elif kind is not None:
            chosen[f"{key}.type: {kind}"] = meaning
            if meaning == "bf16":
                report.note(f"{key}.type: bfloat16 means precision: bf16, as in GPT-NeoX of 2022")
        elif enabled:
            chosen[f"{key}.enabled: true"] = key
    different = set(chosen.values())
    if len(different) > 1:
        report.fault(f"precision: {contradiction(*chosen)}")
    elif different:
        given["precision"] = different.pop()


def switch_off(merged: dict[str, Any], given: dict[str, Any], report: Report) -> None:
    """`fp16.enabled: false` in a later source cancels the fp16 of an earlier one only."""
    off = given.pop(SWITCHED_OFF, [])
    before = merged.get("precision")
    if "precision" in given or before not in ("bf16", "fp16"):
        return
    if before in off:
        merged["precision"] = "fp32"
    elif off:
        report.note(
            f"{off[0]}.enabled: false leaves precision at {before}; for float32 set precision: fp32"
        )


def _attention(given: dict[str, Any], report: Report) -> None:
    """attention_config and sliding_window_width become `window` or `window_layers`."""
    width = given.pop("sliding_window_width", None)
    window = None
    if type(width) is int and width >= 0:
        window = width + 1
        report.note(
            f"sliding_window_width: {width} means window: {window}, as GPT-NeoX does not count the"
            " token itself"
        )
    elif width is not None:
        report.fault(f"sliding_window_width: must be a whole number, got {width!r}")
    if "attention_config" not in given:
        if window is not None:
            given.setdefault("window", window)
        return
    value = given.pop("attention_config")
    try:
        kinds = _kinds(value)
    except (TypeError, ValueError):
        report.fault(
            f'attention_config: must be like [[["global"], 12]], got {value!r}; drop it for full'
            " attention in every layer"
        )
        return
    others = sorted({*kinds} - {*WINDOWED, "global"})
    if others:
        report.fault(
            f"attention_config: {', '.join(others)} is not offered, only global, flash and local;"
            " drop it, or see the keys window, window_layers and blockwise"
        )
    elif window is None and "local" in kinds:
        report.fault(
            "attention_config: local needs sliding_window_width here, which GPT-NeoX counts in"
            " blocks of DeepSpeed's sparse attention; give it, or window_layers: [256, null]"
        )
    elif window is None or len({*kinds}) == 1:
        if window is not None and kinds[0] in WINDOWED:
            given.setdefault("window", window)
        report.no_effect(
            "attention_config", "every layer is the same, and global and flash are full attention"
        )
    else:
        pattern = [window if kind in WINDOWED else None for kind in kinds]
        given.setdefault("window_layers", pattern)
        shown = str(pattern).replace("None", "null")
        report.note(
            f"attention_config: means window_layers: {shown}, exactly so many tokens,"
            " where GPT-NeoX's local attention has blocks"
        )


def _kinds(value: Any) -> list[str]:
    """The kinds of an attention_config, which repeat over the layers.

    Raises TypeError or ValueError if it has another form.
    """
    if not value or len(value) > MOST_LAYERS:
        raise ValueError(value)
    if all(isinstance(item, str) for item in value):  # one for each layer
        return list(value)
    kinds: list[str] = []
    for names, times in value:
        if times == "all":
            return [str(name) for name in names]
        if not 0 < times <= MOST_LAYERS:
            raise ValueError(value)
        kinds += [str(name) for name in names] * times
    return kinds


def _one_corpus(given: dict[str, Any], report: Report) -> None:
    """One corpus for training, validation and test, as in the files of Pythia, is data_path."""
    paths = [given.get(key) for key in CORPORA]
    corpora = {str(path) for value in paths for path in as_list(value)}
    if None in paths or len(corpora) != 1:
        return
    for key in CORPORA:
        given.pop(key)
        given.pop(key.replace("paths", "weights"), None)
    given["data_path"] = corpora.pop()
    report.note(
        f"{', '.join(CORPORA)}: mean data_path, whose parts split divides; GPT-NeoX would"
        " validate on the text of the training"
    )


def _encoding(given: dict[str, Any], report: Report) -> None:
    """A published name of an encoding becomes ours."""
    name = given.get("pos_emb")
    if not isinstance(name, str) or not (name in MEANINGS or name in ALIASES):
        return
    encoding, options = MEANINGS.get(name) or (ALIASES[name], {})
    given["pos_emb"] = encoding
    args = given.get("pos_emb_args", {})
    if options and isinstance(args, dict):
        given["pos_emb_args"] = options | dict(args)
    with_options = f" with {_listed(options)}" if options else ""
    note = f"pos_emb: {name} means {encoding}{with_options}"
    hidden = SPELLINGS["notes"].get(name)
    report.note(f"{note}; {hidden}" if hidden else note)


def _listed(options: Mapping[str, Any]) -> str:
    words = [f"{option}: {value}" for option, value in options.items()]
    return ", ".join(words).replace("False", "false")


def complete_recipe(
    sources: Iterable[Mapping[str, Any]], merged: dict[str, Any], report: Report
) -> None:
    """Give a recipe of 2022, as KERPLE's and MEP's, its learning rate schedule.

    `fp16: {type: bfloat16}` marks it: no later GPT-NeoX reads it so, and none of our files has it.
    Notes say what remains different. docs/published_files.md has all of it.
    """
    given = list(sources)
    halves = [source.get("fp16") for source in given]
    if not any(isinstance(fp16, dict) and "bf" in str(fp16.get("type")) for fp16 in halves):
        return
    if "lr_schedule" not in merged:
        merged["lr_schedule"] = "neox-2022"
        report.note(
            "lr_schedule: neox-2022, as the files are of 2022 (fp16.type: bfloat16);"
            " set lr_schedule: standard for today's"
        )
    if not merged.get("paper_precision"):
        report.note(
            "of 2022: positions, distances and biases are float32 here; the forks rounded them to"
            " bfloat16; paper_precision: true does so too"
        )
    if not any(source.get("attention_softmax_in_fp32") for source in given):
        report.note(
            "of 2022: the softmax is float32 here; the forks' was bfloat16 without"
            " attention_softmax_in_fp32"
        )


def fold(merged: dict[str, Any], options: set[str], report: Report) -> None:
    """Old keys whose meaning depends on other keys; the chosen encoding takes `options`."""
    args = merged.get("pos_emb_args") or {}
    if isinstance(args, dict):  # else it is reported with the other keys
        args = dict(args)
        _fold_options(merged, args, options, report)
        if args:
            merged["pos_emb_args"] = args

    epsilon = merged.pop("rms_norm_epsilon", None)
    if epsilon is not None and merged.get("norm") == "rmsnorm":
        merged["layernorm_epsilon"] = epsilon
        report.note(f"rms_norm_epsilon: {epsilon} means layernorm_epsilon, as norm is rmsnorm")
    elif epsilon is not None:
        report.no_effect("rms_norm_epsilon", "norm is not rmsnorm")

    multiple = merged.pop("mlp_multiple_of", None)
    hidden = merged.get("hidden_size")
    width = merged.get("intermediate_size") or (4 * hidden if isinstance(hidden, int) else 0)
    if multiple is None or not isinstance(width, int):
        return
    if not isinstance(multiple, int) or multiple <= 0:
        report.fault(f"mlp_multiple_of: must be a whole number > 0, got {multiple!r}")
        return
    if merged.get("activation") != "swiglu":
        step, wanted = 2 * multiple, width
    else:  # two thirds for gate and values together, so that the MLP has as many weights
        step, wanted = multiple, int(width * 2 / 3) // 2
    merged["intermediate_size"] = -(-wanted // step) * step
    report.note(
        f"mlp_multiple_of: {multiple} with a width of {width} means intermediate_size:"
        f" {merged['intermediate_size']}, as GPT-NeoX counts it"
    )


def _fold_options(
    merged: dict[str, Any], args: dict[str, Any], options: set[str], report: Report
) -> None:
    """Keys of single encodings become options."""
    name = merged.get("pos_emb")
    for old, option in OPTIONS.items():
        if old not in merged:
            continue
        value = merged.pop(old)
        if option not in options:
            report.no_effect(old, f"pos_emb {name} has no such option")
        elif args.setdefault(option, value) != value:
            report.fault(contradiction(f"{old}: {value}", f"pos_emb_args.{option}: {args[option]}"))

    if "alibi_scaling" not in merged:
        return
    scaling = merged.pop("alibi_scaling")
    meant = {}
    if {"scaling", "factor", "rotary_pct"} <= options:
        # 0 is plain, 1 is NTK-by-parts with factor 1, which is plain, all else is YaRN.
        if scaling not in (0, 1):
            meant = {"scaling": "yarn", "factor": 2.0}
            meant |= {option: args[option] for option in meant if option in args}
    elif {"slope_factor", "normalized"} <= options:
        # A factor of the slopes, where they are ALiBi's: 2^n below 10, n from there on.
        slope = args.get("slope_factor")
        if isinstance(slope, int | float) and isinstance(scaling, int):
            meant = {"slope_factor": slope * (2**scaling if scaling < 10 else scaling)}
    else:
        report.no_effect("alibi_scaling", f"the MEP fork does not use it for {name} either")
        return
    args |= meant
    report.note(
        f"alibi_scaling: {scaling} meant {_listed(meant) or f'plain {name}'} in the MEP fork,"
        " which is what it is here"
    )
