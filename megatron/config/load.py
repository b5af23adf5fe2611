"""From files and overrides to one checked Config; every fault in a single message."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config.config import COPY, Config, exists, is_relative, places
from megatron.config.cross_checks import check_together, zero_that_runs
from megatron.config.legacy import (
    AFTER_MERGE,
    CORPORA,
    NAMES,
    complete_recipe,
    fold,
    switch_off,
    translate,
)
from megatron.config.messages import (
    MOST_LINES,
    Report,
    bad_configuration,
    contradiction,
    lines,
    no_such_key,
    shortened,
)
from megatron.config.schema import (
    KEYS,
    SECTIONS,
    Data,
    Position,
    Section,
    Training,
    all_keys,
    as_list,
    default_of,
)
from megatron.config.yaml_files import find_file, merge, read_file, read_overrides
from megatron.errors import UserError, closest
from megatron.files import read_small
from megatron.positions import FILES, REGISTRY, fingerprint, load_file, options_of

COMMAND_LINE = "command line"
DATA_PATHS = ("data_path", *CORPORA)
USER_FILE = "pos_emb_file"
SETTINGS = {*AFTER_MERGE, *(key.name for key in all_keys())}
LARGEST_USER_FILE = 1 << 24  # bytes
Source = tuple[str, dict[str, Any]]  # the name of a file or COMMAND_LINE, and what it sets


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files from left to right and lay `key=value` words over them.

    Raises UserError with every fault at once.
    """
    assert not isinstance(paths, (str, Path)), "load takes a list of files"
    report = Report()
    sources = [_read(path, report) for path in paths]
    if overrides:
        sources.append((COMMAND_LINE, read_overrides(overrides, report.fault)))
    names = tuple(name for name, _ in sources)
    _replace_steps(sources, report)

    # First of all: what the user's file registers may be what pos_emb names.
    code = None
    try:
        code = _run_user_file(sources)
    except UserError as fault:
        report.fault(str(fault))
    merged: dict[str, Any] = {}
    for _, given in sources:
        _lay_over(merged, given, report)
    complete_recipe([given for _, given in sources], merged, report)
    encoding = merged.setdefault("pos_emb", Position.model_fields["pos_emb"].default)
    is_registered = isinstance(encoding, str) and encoding in REGISTRY
    fold(merged, set(options_of(encoding)) if is_registered else set(), report)
    origins = _origins(sources, merged)

    sections = _sections(merged, report)
    if code is None and merged.get(USER_FILE) and not is_registered:
        # The user's file has a fault, which is reported. What it would register is unknown.
        sections.pop("position", None)
    check_together(sections, report)
    # A file of Config.save names every key, so nobody chose these.
    chosen = [given for name, given in sources if not _is_saved(name, given)]
    keys_given = frozenset(key for given in chosen for key in given)
    data, training = sections.get("data"), sections.get("training")
    if isinstance(training, Training) and training.train_epochs and "train_iters" in keys_given:
        report.fault(
            f"{contradiction('train_iters', 'train_epochs')};"
            " train_epochs=null drops that of an earlier file"
        )
    if isinstance(data, Data) and data.train_data_paths and "split" in keys_given:
        report.no_effect("split", "corpora of train_data_paths are whole")
    if report.faults:
        raise bad_configuration(names, report.faults)

    typed: dict[str, Any] = dict(sections)
    typed["parallel"] = zero_that_runs(typed["precision"], typed["parallel"], merged, report)
    return Config(
        **typed,
        pos_emb_code=code,
        sources=names,
        notes=tuple(report.notes),
        given=keys_given,
        origins=origins,
    )


def _read(path: str | Path, report: Report) -> Source:
    """A file with what it sets; one that cannot be read is a fault."""
    try:
        file = find_file(path)
        given = read_file(file)
    except ValueError as fault:
        report.fault(str(fault))
        return str(path), {}
    if not _is_checkpoint(str(file)):
        return str(file), resolve_inputs(given, file, report)
    # A checkpoint's file names every key. So that a later source that changes a leader changes its
    # followers too, those with their leader's value are left out.
    for key in all_keys():
        if key.follows in given and given.get(key.name) == given[key.follows]:
            del given[key.name]
    return str(file), given


def resolve_inputs(given: dict[str, Any], file: Path, report: Report) -> dict[str, Any]:
    """The settings of one YAML file, with its relative paths made relative to the current folder.

    A relative path means a file in the current folder, as for any command; if there is none, a file
    beside the YAML file. A note says so if there are both. Outputs (save, log_dir, …) are relative
    to the current folder.
    """
    resolved = dict(given)
    for key in all_keys():
        if not key.names_input or key.name not in given:
            continue
        value = given[key.name]
        is_list = key.name in CORPORA
        paths = []
        for path in as_list(value) if is_list else [value]:
            beside = str(file.parent / path) if is_relative(path) else ""
            if beside and exists(key.name, beside):
                if not exists(key.name, path):
                    path = beside
                elif os.path.realpath(path) != os.path.realpath(beside):
                    report.note(
                        f"{key.name}: {path} of the current folder is used, and not {beside} beside"
                        f" {file.name}; give the whole path of the one you mean"
                    )
            paths.append(path)
        resolved[key.name] = paths if is_list else paths[0]
    return resolved


def _replace_steps(sources: list[Source], report: Report) -> None:
    """Take away each train_iters for which a later source has train_epochs."""
    with_epochs = [place for place, (_, given) in enumerate(sources) if given.get("train_epochs")]
    last = max(with_epochs, default=0)
    for name, given in sources[:last]:
        if "train_iters" in given and not _is_checkpoint(name):
            report.note(
                f"train_iters: {given.pop('train_iters')} of {name} is dropped, because a later"
                f" source sets train_epochs: {sources[last][1]['train_epochs']}"
            )


def _is_checkpoint(source: str) -> bool:
    """Whether a source is the config.yml of a checkpoint."""
    return os.path.isfile(source) and os.path.exists(Path(source).parent / "checkpoint.json")


def _is_saved(source: str, given: Mapping[str, Any]) -> bool:
    return _is_checkpoint(source) or given.keys() >= KEYS.keys()


# --- The user's own encodings ---


def run_named(words: Sequence[str]) -> None:
    """Register the encodings of the file that `key=value` words name, before all else is read.

    Words that cannot be read are left to `load`. Raises UserError if the file cannot be run.
    """
    _run_user_file([(COMMAND_LINE, read_overrides(words, lambda fault: None))])


def _run_user_file(sources: Sequence[Source]) -> str | None:
    """Register the encodings of the file that the last source with this key names; return its text.

    None if no source names a file. Raises UserError if the file cannot be run or, for a source that
    is a checkpoint's config.yml, if the user has not had the same text run.
    """
    naming = [(source, given[USER_FILE]) for source, given in sources if USER_FILE in given]
    if not naming:
        return None
    source, path = naming[-1]
    if not isinstance(path, str):  # the section `position` refuses what is not text
        return None
    if not _is_checkpoint(source):
        try:
            return load_file(path)
        except UserError as fault:
            if not is_relative(path) or exists(USER_FILE, path):
                raise
            raise UserError(f"{fault}\n  {USER_FILE}: {places(path)}") from None
    copy = Path(source).with_name(COPY)
    try:
        text = read_small(copy, LARGEST_USER_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{USER_FILE}: {copy} is missing or is not text; copy the checkpoint again"
        ) from None
    if fingerprint(text) in FILES:
        return text
    other = f", and {', '.join(FILES.values())} has another text" if FILES else ""
    raise UserError(
        f"{USER_FILE}: {copy} defines this checkpoint's encoding{other}; code that lies in a"
        f" checkpoint is not run unasked: read it, then write {USER_FILE}={copy} on the command"
        f" line (to a tool --from {copy}), or name your own file with the same text"
    )


# --- Merging ---


def _lay_over(merged: dict[str, Any], given: Mapping[str, Any], report: Report) -> None:
    """Let one source win over the earlier ones."""
    later = translate(given, report)
    switch_off(merged, later, report)
    encoding = merged.get("pos_emb")
    changed = later.get("pos_emb", encoding) != encoding
    if encoding is not None and changed and merged.pop("pos_emb_args", None):
        report.note(
            f"pos_emb_args of {encoding} are dropped, because a later source sets pos_emb:"
            f" {later['pos_emb']}"
        )
    # A later pattern of layers replaces the earlier keys for all layers, and they replace it.
    for pattern, keys in (
        ("pos_emb_layers", ("pos_emb", "pos_emb_args")),
        ("window_layers", ("window",)),
    ):
        winner, losers = "", ()
        if later.get(pattern):
            winner, losers = pattern, keys
        elif keys[0] in later and pattern not in later:
            winner, losers = keys[0], (pattern,)
        dropped = [key for key in losers if merged.pop(key, None)]
        if dropped:
            report.note(f"{', '.join(dropped)}: dropped, because a later source sets {winner}")
    for key, value in later.items():
        merged[key] = merge(merged.get(key), value)


def _origins(sources: Sequence[Source], merged: Mapping[str, Any]) -> dict[str, str]:
    """Who set a key: the last source that does, and how it is written there if it is older."""
    origins = {}
    if "lr_schedule" in merged:
        origins["lr_schedule"] = "the recipe of 2022"
    for source, given in sources:
        written = _settings(given)
        for name in _settings(translate(given, Report())):
            origins[name] = source
        for key, value in given.items():
            for name, today in _settings(translate({key: value}, Report())).items():
                name = AFTER_MERGE.get(name, name)
                if name not in written or written[name] != today:
                    origins[name] = f"{source}, written as {shortened(f'{key}: {value}')}"
    set_now = _settings(merged)
    return {name: origin for name, origin in origins.items() if name in set_now}


def _settings(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of the keys that are given, by their names with dots."""
    values = {}
    for key, value in given.items():
        name = prefix + key
        if name in SETTINGS:
            values[name] = value
        elif isinstance(value, Mapping):
            values |= _settings(value, f"{name}.")
    return values


def _sections(merged: dict[str, Any], report: Report) -> dict[str, Section]:
    """The sections that have no fault in themselves; the faults of the others are reported."""
    incomplete = bool(report.faults)  # if a source could not be read, its keys are not missing
    unknown = [key for key in merged if key not in KEYS]
    if len(unknown) > MOST_LINES:
        report.fault(f"{len(unknown)} keys do not exist; the first of them follow")
    known = [*KEYS, *(key.name for key in all_keys()), *NAMES]
    for key in unknown[:MOST_LINES]:
        report.fault(no_such_key(key, known))
    # A misspelt key is not also missing, and a follower is wrong only because its leader is.
    not_missing = {closest(key, KEYS) for key in unknown[:MOST_LINES]}
    followers = set()
    for key in all_keys():
        if key.follows and merged.get(key.name) is None:
            info = SECTIONS[KEYS[key.follows]].model_fields[key.follows]
            merged[key.name] = merged.get(key.follows, default_of(info))
            followers.add(key.name)
    sections = {}
    for name, section in SECTIONS.items():
        given = {key: merged[key] for key in section.model_fields if key in merged}
        try:
            sections[name] = section.model_validate(given)
        except ValidationError as error:
            for key, kind, line in lines(section, error):
                excused = kind == "missing" and (incomplete or key in not_missing)
                if key not in followers and not excused:
                    report.fault(line)
    return sections
