"""Turn files and overrides into one checked Config; all faults are in a single message."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config.config import COPY, Config
from megatron.config.cross_checks import check_together, zero_that_runs
from megatron.config.legacy import (
    AFTER_MERGE,
    CORPORA,
    NAMES,
    SWITCHES,
    complete_recipe,
    fold,
    translate,
)
from megatron.config.messages import Report, bad_configuration, lines, no_such_key
from megatron.config.schema import KEYS, PATHS, SECTIONS, Position, all_keys, as_list, default_of
from megatron.config.yaml_files import Nested, find_file, merge, read_file, read_overrides
from megatron.errors import UserError, control_fault
from megatron.files import expanded, read_small
from megatron.layer_kinds import options_of_layers
from megatron.positions import (
    FILES,
    LARGEST_USER_FILE,
    REGISTRY,
    load_file,
    options_of,
    syntax_fingerprint,
)
from megatron.splits import TASK_PREFIX

COMMAND_LINE = "command line"
DATA_PATHS = ("data_path", *CORPORA)
USER_FILE = "pos_emb_file"
SETTINGS = {*AFTER_MERGE, *(key.name for key in all_keys())}
REPLACED = {
    "pos_emb": ["pos_emb_layers"],
    "pos_emb_layers": ["pos_emb", "pos_emb_args"],
    "window": ["window_layers"],
    "window_layers": ["window"],
}
"""The keys of earlier sources that a key replaces."""
Source = tuple[str, dict[str, Any]]  # the name of a file or COMMAND_LINE, and what it sets


def load(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), *, trains: bool = True
) -> Config:
    """Merge YAML files from left to right, then apply `key=value` words.

    trains: False for an evaluation, which skips the checks that only matter for training
    Raises UserError that lists all faults at once.
    """
    report = Report()
    sources = [_read(path, report) for path in paths]
    if overrides:
        sources.append((COMMAND_LINE, read_overrides(overrides, report.fault)))
    names = tuple(name for name, _ in sources)
    for _, settings in sources:
        for key in PATHS & settings.keys():
            try:
                settings[key] = expanded_all(settings[key])
            except UserError as fault:
                report.fault(f"{key}: {fault}")

    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    patterns = [settings["layers"] for _, settings in sources if "layers" in settings]
    try:
        # pos_emb may name what the user's file registers, and the options of layer kinds are keys
        # too, so both come before all other checks.
        code = _run_user_file(sources)
        options = options_of_layers(map(str, as_list(patterns[-1] if patterns else None)))
    except UserError as fault:
        report.fault(str(fault))
        raise bad_configuration(names, report.faults) from None
    for name, settings in sources:
        later = translate(settings, report)
        arguments = {key: later.pop(key) for key in options & later.keys()}
        if arguments:
            later["layer_args"] = {**(later.get("layer_args") or {}), **arguments}
        encoding = merged.get("pos_emb")
        replaced = [key for winner in REPLACED.keys() & later.keys() for key in REPLACED[winner]]
        replaced = [key for key in replaced if key not in later]
        if encoding is not None and later.get("pos_emb", encoding) != encoding:
            replaced.append("pos_emb_args")  # these are the options of the earlier encoding
        for key in replaced:
            if value := merged.pop(key, None):
                report.note(f"{key}: {value} is dropped, because {name} replaces it")
        merged = merge(merged, Nested(later))
        origins |= {AFTER_MERGE.get(key, key): name for key in _settings(later)}
    complete_recipe([settings for _, settings in sources], merged, report)
    encoding = merged.setdefault("pos_emb", Position.model_fields["pos_emb"].default)
    is_registered = isinstance(encoding, str) and encoding in REGISTRY
    fold(merged, set(options_of(encoding)) if is_registered else set(), report)
    if "lr_schedule" in merged:
        origins.setdefault("lr_schedule", "the recipe of 2022")
    origins = {key: origins[key] for key in _settings(merged) if key in origins}
    # A file of Config.save names every key, so nobody chose these.
    saved = {
        name for name, settings in sources if _is_checkpoint(name) or settings.keys() >= {*KEYS}
    }
    chosen = {key.partition(".")[0] for key, name in origins.items() if name not in saved}

    is_task = str(merged.get("data_path")).startswith(TASK_PREFIX)
    if "split" in chosen and (is_task or merged.get("train_data_paths")):
        report.no_effect("split", "it only divides a single corpus, not a task or train_data_paths")
    for key, value in merged.items():
        if fault := control_fault(value):
            report.fault(f"{key}: {fault}")
    sections = _sections(merged, report)
    check_together(sections, report, trains=trains)
    if report.faults:
        raise bad_configuration(names, report.faults)

    zero_that_runs(sections, merged, report)
    return Config(
        **sections,
        pos_emb_code=code,
        sources=names,
        notes=tuple(report.notes),
        chosen=frozenset(chosen),
        origins=origins,
    )


def expanded_all(value: Any) -> Any:
    """A user's path, a list of paths or a comma-separated text, with ~ and $NAME expanded."""
    if isinstance(value, list):
        return [expanded_all(part) for part in value]
    if not isinstance(value, str):
        return value
    return ",".join(map(expanded, value.split(",")))


def _read(path: str | Path, report: Report) -> Source:
    """A file and what it sets; an unreadable file is reported as a fault."""
    try:
        file = find_file(path)
        settings = read_file(file)
    except ValueError as fault:
        report.fault(str(fault))
        return str(path), {}
    # A checkpoint's file names every key. So that a later source that changes a leader changes its
    # followers too, those with their leader's value are left out.
    if _is_checkpoint(str(file)):
        for key in all_keys():
            if key.follows in settings and settings.get(key.name) == settings[key.follows]:
                del settings[key.name]
    return str(file), settings


def _is_checkpoint(source: str) -> bool:
    """Whether a source is the config.yml of a checkpoint."""
    return os.path.isfile(source) and os.path.exists(Path(source).parent / "checkpoint.json")


def _run_user_file(sources: Sequence[Source]) -> str | None:
    """Register the encodings of pos_emb_file (of the last source that sets it) and return its text.

    None if no source names a file. Raises UserError if the file cannot be run, or if a checkpoint's
    config.yml names it and the user hasn't allowed the same text to run.
    """
    naming = [(name, settings[USER_FILE]) for name, settings in sources if USER_FILE in settings]
    if not naming:
        return None
    source, path = naming[-1]
    if not isinstance(path, str):  # the section `position` rejects what is not text
        return None
    if not _is_checkpoint(source):
        return load_file(path)
    copy = Path(source).with_name(COPY)
    try:
        text = read_small(copy, LARGEST_USER_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{USER_FILE}: {copy} is missing or is not text; copy the checkpoint again"
        ) from None
    if syntax_fingerprint(text) in FILES:
        return text
    raise UserError(
        f"{USER_FILE}: {copy} defines this checkpoint's encoding, but code inside a checkpoint"
        f" never runs without your consent: read it, then write {USER_FILE}={copy} on the command"
        f" line (to a tool --from {copy}), or name your own file with the same code"
    )


def _settings(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys that are set, by their dotted names."""
    names = []
    for key, value in values.items():
        name = prefix + key
        if name in SETTINGS:
            names.append(name)
        elif isinstance(value, Mapping):
            names += _settings(value, f"{name}.")
    return names


def _sections(merged: dict[str, Any], report: Report) -> dict[str, Any]:
    """The sections that are valid by themselves; faults of the others are reported."""
    incomplete = bool(report.faults)  # keys of an unreadable source don't count as missing
    names = [*KEYS, *(key.name for key in all_keys()), *NAMES, *SWITCHES]
    for key in merged:
        if key not in KEYS:
            report.fault(no_such_key(key, names))
    # A follower is only wrong because its leader is wrong.
    followers = set()
    for key in all_keys():
        if key.follows and merged.get(key.name) is None:
            info = SECTIONS[KEYS[key.follows]].model_fields[key.follows]
            merged[key.name] = merged.get(key.follows, default_of(info))
            followers.add(key.name)
    sections = {}
    for name, section in SECTIONS.items():
        values = {key: merged[key] for key in section.model_fields if key in merged}
        try:
            sections[name] = section.model_validate(values)
        except ValidationError as error:
            for key, kind, line in lines(error, names):
                excused = kind == "missing" and incomplete
                if key not in followers and not excused:
                    report.fault(line)
    return sections
