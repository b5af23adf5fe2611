"""The form of a sweep file: its parts, their kinds, and what evaluations may be asked for."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config.messages import lines, shortened
from megatron.config.schema import KEYS, SECTIONS
from megatron.config.schema import Evaluation as Measuring
from megatron.errors import CONTROL, UserError, did_you_mean
from megatron.evaluation.bounds import number_fault
from megatron.evaluation.protocols import PROTOCOLS
from megatron.evaluation.run import DTYPES
from megatron.model.methods import fault_of_name

PARTS: dict[str, type] = {
    "base": list,
    "settings": dict,
    "grid": dict,
    "exclude": list,
    "extra": list,
    "evaluate": dict,
    "keep_optimizer_states": bool,
}
MOST_CELLS = 10_000
KINDS = {list: "a list", dict: "a mapping", bool: "true or false"}
LONGEST_NAME = 200  # characters of a cell's folder; most disks take 255
LABEL = re.compile(r"[\w.+-]{1,100}")
# Options of evaluate.py with the values that they know; empty: whole numbers. A sweep gives
# checkpoint, step and output itself.
OPTIONS: dict[str, tuple[str, ...]] = {
    "protocol": tuple(PROTOCOLS),
    "lengths": (),
    "windows": (),
    "start": (),
    "tail": (),
    "stride": (),
    "dtype": tuple(DTYPES),
    "sinks": (),
    "clip_distance": (),
    "method": (),
}
SEVERAL = ("protocol", "lengths", "sinks", "clip_distance", "method")
ONLY = "only"  # of an evaluation: the values of the cells that it is for


def check_form(parts: Mapping[str, Any], path: Path) -> None:
    """Raise UserError with all that is wrong with the form of a sweep file."""
    names = ", ".join(sorted(PARTS))
    faults = [f"{key}: no such part; a sweep has {names}" for key in parts.keys() - PARTS.keys()]
    for key, kind in PARTS.items():
        if key in parts and not isinstance(parts[key], kind):
            faults.append(f"{key}: give {KINDS[kind]}")
    if not parts.get("grid"):
        faults.append(
            "grid: not given; write axes with their values, such as pos_emb: [alibi, rotary]"
        )
    if not faults:
        faults = _faults_of_axes(parts["grid"]) + _faults_of_lists(parts)
        faults += _faults_of_evaluations(parts.get("evaluate", {}))
    if faults:
        raise UserError("\n  ".join([f"bad sweep ({path})", *faults]))


def _faults_of_axes(grid: Mapping[str, Any]) -> list[str]:
    faults = []
    for axis, choices in grid.items():
        if not isinstance(choices, list | dict) or not choices:
            faults.append(
                f"grid: {axis} has no values; give a list, or a mapping of names to settings"
            )
        elif any(CONTROL.search(str(choice)) for choice in choices):
            faults.append(f"grid: a value of {axis} has a control character; write it without")
        elif isinstance(choices, dict):
            faults += _not_mappings(f"grid: {axis}: ", choices)
    count = math.prod(len(choices) for choices in grid.values() if isinstance(choices, list | dict))
    if count > MOST_CELLS:
        faults.append(f"grid: {count:,} cells; a sweep has at most {MOST_CELLS:,} - split it")
    return faults


def _faults_of_lists(parts: Mapping[str, Any]) -> list[str]:
    """Entries of another kind than base, exclude, extra and evaluate take."""
    faults = []
    for name in parts.get("base", []):
        if not isinstance(name, str):
            faults.append(f"base: {name} is not the name of a file")
    for key in ("exclude", "extra"):
        for point in parts.get(key, []):
            if not isinstance(point, dict):
                faults.append(f"{key}: {point} is no point of the grid; write {{axis: value}}")
    return faults


def _faults_of_evaluations(evaluations: Mapping[str, Any]) -> list[str]:
    """Labels that are no names of files, and options that evaluate.py would refuse."""
    faults = _not_mappings("evaluate: ", evaluations)
    for label, options in evaluations.items():
        if not LABEL.fullmatch(label):
            faults.append(
                f"evaluate: {shortened(label)!a} names a file - use letters, digits and . _ + -"
                " alone, at most 100"
            )
        where = f"evaluate: {shortened(label)}: "
        if isinstance(options, dict):
            faults += [where + fault for fault in _faults_of_options(options)]
    return faults


def _faults_of_options(options: Mapping[str, Any]) -> list[str]:
    """What evaluate.py would refuse of one evaluation's options and settings."""
    faults = []
    for key, value in options.items():
        if key == ONLY:
            if not isinstance(value, dict):
                faults.append("only: name the cells that it is for, such as {seed: 1235}")
        elif key in KEYS:
            faults += _faults_of_setting(key, value)
        elif key in OPTIONS:
            faults += [f"{key}: {fault}" for fault in _faults_of_values(key, value)]
        else:
            known = [*OPTIONS, ONLY, *Measuring.model_fields]
            hint = did_you_mean(key, known) or f"use {', '.join(known)}"
            faults.append(f"{shortened(key)}: no such option of an evaluation; {hint}")
    return faults


def _faults_of_setting(key: str, value: Any) -> list[str]:
    """What is wrong with the value of one key; its section may need other keys too."""
    section = SECTIONS[KEYS[key]]
    try:
        section.model_validate({key: value})
    except ValidationError as error:
        return [line for _, kind, line in lines(section, error) if kind != "missing"]
    return []


def _faults_of_values(option: str, value: Any) -> list[str]:
    """What is wrong with the value of one option, or with each of its several values."""
    several = value if isinstance(value, list) and option in SEVERAL else [value]
    faults = [_fault_of_value(option, one) for one in several]
    return [fault for fault in faults if fault is not None]


def _fault_of_value(option: str, value: Any) -> str | None:
    choices = OPTIONS[option]
    if option == "method":
        return fault_of_name(str(value))
    if choices:
        if value in choices:
            return None
        return f"{shortened(str(value))} is not known; use {', '.join(choices)}"
    if isinstance(value, int) and not isinstance(value, bool):
        return number_fault(option, value)
    return f"must be a whole number, got {shortened(str(value))}"


def _not_mappings(where: str, of_names: Mapping[str, Any]) -> list[str]:
    return [
        f"{where}{name}: give a mapping of settings"
        for name, settings in of_names.items()
        if settings is not None and not isinstance(settings, dict)
    ]
