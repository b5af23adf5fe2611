"""What KERPLE's and MEP's names of encodings mean here, and their keys of single encodings.

docs/published_files.md explains each name.
"""

from collections.abc import Callable
from typing import Any

from megatron.config.faults import Report, contradiction
from megatron.config.read import Nested
from megatron.positions import ALIASES

FOLDED = {  # old key -> option of the encoding
    "rotary_pct": "rotary_pct",
    "rotary_emb_base": "base",
    "rpe_num_buckets": "num_buckets",
    "rpe_max_distance": "max_distance",
}
OF_ENCODINGS = (*FOLDED, "alibi_scaling")  # their meaning depends on the pos_emb that wins

Meaning = tuple[str, dict[str, Any]]  # an encoding and its options

# Their code clamps these slopes at 0.01, and multiplies them by what alibi_scaling says.
_SLOPES = {"slope_factor": 1.0}
_NORMALIZED: Meaning = ("scaled_distance", _SLOPES)
_NETWORK: Meaning = ("scaled_distance", {"network": "fixed"})
MEANINGS: dict[str, Meaning] = {
    "kerple_power_a_": ("kerple_power", {"p": 1.0}),
    "kerple_power_norm_a_": ("scaled_distance", {}),
    # Whatever else these names say, the code reads "learned", "norm" and the letter a in them.
    "kerple_power_learned_norm": _NETWORK,
    "kerple_power_learned_norm_a_": _NETWORK,
    "kerple_power_learned_a_norm8": _NETWORK,
    "kerple_power_original": ("scaled_distance", {"normalized": False, **_SLOPES}),
    "kerple_power_original__": ("scaled_distance", {"normalized": False, **_SLOPES}),
    "kerple_power_norm_original": _NORMALIZED,
    "kerple_power_norm_original__": _NORMALIZED,
    "kerple_power_norm_original_scaling__": _NORMALIZED,
    "kerple_power_original_norm": _NORMALIZED,
    "kerple_power_norm_clip_original_scaling__": ("scaled_distance", {"clip": 512, **_SLOPES}),
}
_NAME_HIDES_MIXTURE = (
    "in the MEP fork many different mixtures carry this name, and only a file's name tells which; "
)
_OTHER_MIXTURE = (
    _NAME_HIDES_MIXTURE + "for another, set pos_emb: mep and pos_emb_args.kernels,"
    " which tools/migrate_config.py proposes from the file's name"
)
_NOTES = {
    "snope_norm_original_scaling__": _OTHER_MIXTURE,
    "snope_norm_original_scaling_": _OTHER_MIXTURE,
    "snope_kerplelog": (
        f"the released code mixes gaussian, exp, t5 and kerple_log; {_NAME_HIDES_MIXTURE}"
        "for gaussian and kerple_log alone, set pos_emb: mep_param;"
        " tools/migrate_config.py proposes kernels from the file's name"
    ),
}


def meaning_of(name: str) -> Meaning | None:
    """Our encoding and its options for a published name; None for any other name."""
    if name in MEANINGS:
        return MEANINGS[name]
    if name in ALIASES:  # pos_emb_file may have added some
        return ALIASES[name], {}
    return None


def spelled_today(given: dict[str, Any], report: Report) -> None:
    """Replace a published name of an encoding by ours."""
    name = given.get("pos_emb")
    meaning = meaning_of(name) if isinstance(name, str) else None
    if meaning is None:
        return
    given["pos_emb"], options = meaning
    args = given.get("pos_emb_args", {})
    if options and isinstance(args, dict):
        # Words such as pos_emb_args.clip=256 change single options of the name's.
        given["pos_emb_args"] = dict(options | args) if isinstance(args, Nested) else options | args
    described = _described(*meaning)
    more = f"; {_NOTES[name]}" if name in _NOTES else ""
    report.note(f"pos_emb: {name} means {described}{more}")


def _described(encoding: str, options: dict[str, Any]) -> str:
    words = [f"{option}: {_as_yaml(value)}" for option, value in options.items()]
    return f"{encoding} with {', '.join(words)}" if words else encoding


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def fold_into_encoding(merged: dict[str, Any], options: set[str], report: Report) -> None:
    """Old keys of single encodings become options of the chosen one, which takes `options`."""
    name = merged["pos_emb"]
    given_args = merged.get("pos_emb_args")
    args = dict(given_args) if isinstance(given_args, dict) else {}
    for old, option in FOLDED.items():
        if old not in merged:
            continue
        value = merged.pop(old)
        if option not in options:
            report.note(f"{old}: accepted, has no effect here: pos_emb {name} has no such option")
            continue
        kept = args.setdefault(option, value)
        if kept != value:
            report.fault(contradiction(f"{old}: {value}", f"pos_emb_args.{option}: {kept}"))
    if args:
        merged["pos_emb_args"] = args
    _alibi_scaling(merged, report)


def _rotary_scaling(value: Any, args: dict[str, Any]) -> dict[str, Any]:
    """0 is plain, 1 is NTK-by-parts with factor 1, which is plain, all else is YaRN."""
    if value in (0, 1):
        return {}
    meant = {"scaling": "yarn", "factor": 2.0}
    return meant | {option: args[option] for option in meant if option in args}


def _slope_scaling(value: Any, args: dict[str, Any]) -> dict[str, Any]:
    """A factor of the slopes, where they are ALiBi's: 2^n below 10, n from there on."""
    if "slope_factor" not in args or not isinstance(value, int):
        return {}
    factor = 2**value if value < 10 else value
    return {"slope_factor": args["slope_factor"] * factor}


# What the MEP fork made of the key alibi_scaling.
SCALING: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "rotary": _rotary_scaling,
    "scaled_distance": _slope_scaling,
}


def _alibi_scaling(merged: dict[str, Any], report: Report) -> None:
    if "alibi_scaling" not in merged:
        return
    value = merged.pop("alibi_scaling")
    name = merged["pos_emb"]
    read = SCALING.get(name) if isinstance(name, str) else None
    if read is None:
        report.note(
            "alibi_scaling: accepted, has no effect here:"
            f" the MEP fork does not use it for {name} either"
        )
        return
    args = merged.get("pos_emb_args") or {}
    if not isinstance(args, dict):
        return  # reported with the other keys
    meant = read(value, args)
    if meant:
        merged["pos_emb_args"] = args | meant
    words = [f"{option}: {setting}" for option, setting in meant.items()]
    meaning = ", ".join(words) or f"plain {name}"
    report.note(f"alibi_scaling: {value} meant {meaning} in the MEP fork, which is what it is here")
