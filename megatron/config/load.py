"""From files and overrides to one checked Config; every fault in a single message."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config import faults
from megatron.config.config import Config
from megatron.config.cross_checks import check_together, zero_that_runs
from megatron.config.faults import Report, bad_configuration
from megatron.config.keys import all_keys, default_of
from megatron.config.legacy import NAMES, fold, switch_off, translate
from megatron.config.paths import INPUTS, exists, is_relative, places, resolve_inputs
from megatron.config.read import find_file, merge, read_file, read_overrides
from megatron.config.recipe_2022 import complete_recipe
from megatron.config.schema import KEYS, SECTIONS, Data, Position, Section, Training
from megatron.config.user_file import KEY as USER_FILE
from megatron.config.user_file import is_checkpoint, run_user_file
from megatron.errors import UserError, closest
from megatron.positions import REGISTRY, options_of

COMMAND_LINE = "command line"
Source = tuple[str, dict[str, Any]]  # the name of a file or COMMAND_LINE, and what it sets
Trace = Callable[[str | None, dict[str, Any], dict[str, Any]], None]


def _ignored(source: str | None, given: dict[str, Any], merged: dict[str, Any]) -> None:
    """No trace."""


def load(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), *, trace: Trace = _ignored
) -> Config:
    """Merge YAML files from left to right and lay `key=value` words over them.

    trace: called after each source with its name, what it sets and what is merged by now, and with
    None and nothing after older keys were converted; see origins.py
    Raises UserError with every fault at once.
    """
    report = Report()
    sources = _steps_replaced(_sources(paths, overrides, report), report)
    named_in = _named_in(sources)
    # First of all: what the user's file registers may be what pos_emb names.
    code = _user_file(sources, named_in, report)
    merged: dict[str, Any] = {}
    for name, given in sources:
        _lay_over(merged, given, report)
        trace(name, given, merged)
    complete_recipe([given for _, given in sources], merged, report)
    merged.setdefault("pos_emb", Position.model_fields["pos_emb"].default)
    fold(merged, _options(merged["pos_emb"]), report)
    trace(None, {}, merged)
    sections = _sections(merged, report)
    if code is None and merged.get(USER_FILE) and not _is_registered(merged["pos_emb"]):
        # The user's file has a fault, which is reported. What it would register is unknown.
        sections.pop("position", None)
    check_together(sections, report)
    _check_given(_given(sources), sections, report)
    names = tuple(name for name, _ in sources)
    if report.faults:
        raise bad_configuration(names, report.faults)
    typed: dict[str, Any] = dict(sections)
    typed["parallel"] = zero_that_runs(typed["precision"], typed["parallel"], merged, report)
    return Config(
        **typed,
        pos_emb_code=code,
        sources=names,
        notes=tuple(report.notes),
        named_in=named_in,
        given=_given(sources),
    )


def _sources(paths: Sequence[str | Path], overrides: Sequence[str], report: Report) -> list[Source]:
    """Each file and the command line with what it sets; what cannot be read is a fault."""
    if isinstance(paths, (str, Path)):
        raise TypeError(f"load takes a list of files, not {paths!r}")
    sources = []
    for path in paths:
        try:
            file = find_file(path)
            given = read_file(file)
        except ValueError as fault:
            report.fault(str(fault))
            sources.append((str(path), {}))
            continue
        if is_checkpoint(str(file)):
            given = _without_followers(given)
        else:
            given = resolve_inputs(given, file, report)
        sources.append((str(file), given))
    if overrides:
        sources.append((COMMAND_LINE, read_overrides(overrides, report.fault)))
    return sources


def _steps_replaced(sources: list[Source], report: Report) -> list[Source]:
    """The sources without the train_iters for which a later one has train_epochs."""
    with_epochs = [place for place, (_, given) in enumerate(sources) if given.get("train_epochs")]
    last = max(with_epochs, default=0)
    replaced = []
    for name, given in sources[:last]:
        if "train_iters" in given and not is_checkpoint(name):
            report.note(
                f"train_iters: {given['train_iters']} of {name} is dropped, because a later source"
                f" sets train_epochs: {sources[last][1]['train_epochs']}"
            )
            given = {key: value for key, value in given.items() if key != "train_iters"}
        replaced.append((name, given))
    return replaced + sources[last:]


def _without_followers(given: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's keys but for those whose value is that of the key that they follow.

    Its file names every key. So a later source that changes a leader changes its followers, as it
    does where nobody has set them.
    """
    leaders = {key.name: key.follows for key in all_keys() if key.follows is not None}
    return {
        key: value
        for key, value in given.items()
        if key not in leaders or leaders[key] not in given or value != given[leaders[key]]
    }


def _named_in(sources: Sequence[Source]) -> dict[str, str | None]:
    """The YAML file that sets each input; None for the command line and for a checkpoint."""
    named_in: dict[str, str | None] = {}
    for source, given in sources:
        has_no_folder = source == COMMAND_LINE or is_checkpoint(source)
        for key in INPUTS & given.keys():
            named_in[key] = None if has_no_folder else source
    return named_in


def _given(sources: Sequence[Source]) -> frozenset[str]:
    """Keys that somebody chose. A file of Config.save names every key, so it is left out."""
    chosen: set[str] = set()
    for source, given in sources:
        if not is_checkpoint(source) and not given.keys() >= KEYS.keys():
            chosen.update(given)
    return frozenset(chosen)


def _check_given(given: frozenset[str], sections: dict[str, Section], report: Report) -> None:
    """Report what only a choice makes a contradiction: a checkpoint's file names every key."""
    data, training = sections.get("data"), sections.get("training")
    if isinstance(training, Training) and training.train_epochs and "train_iters" in given:
        report.fault(
            f"{faults.contradiction('train_iters', 'train_epochs')};"
            " train_epochs=null drops that of an earlier file"
        )
    if isinstance(data, Data) and data.train_data_paths and "split" in given:
        report.note("split: accepted, has no effect here: corpora of train_data_paths are whole")


def _user_file(
    sources: Sequence[Source], named_in: dict[str, str | None], report: Report
) -> str | None:
    """The text of the user's file of encodings; None if there is none or if it has a fault."""
    try:
        return run_user_file(sources)
    except UserError as fault:
        report.fault(str(fault))
    naming = [(source, given[USER_FILE]) for source, given in sources if USER_FILE in given]
    source, path = naming[-1]
    if not is_checkpoint(source) and is_relative(path) and not exists(USER_FILE, path):
        report.fault(places(USER_FILE, path, named_in[USER_FILE]))
    return None


def _lay_over(merged: dict[str, Any], given: dict[str, Any], report: Report) -> None:
    """Let one source win over the earlier ones."""
    given = translate(given, report)
    switch_off(merged, given, report)
    earlier = merged.get("pos_emb")
    later = given.get("pos_emb", earlier)
    changed = earlier is not None and later != earlier
    if changed and merged.pop("pos_emb_args", None):
        report.note(
            f"pos_emb_args of {earlier} are dropped, because a later source sets pos_emb: {later}"
        )
    _drop_replaced(merged, given, "pos_emb_layers", ("pos_emb", "pos_emb_args"), report)
    _drop_replaced(merged, given, "window_layers", ("window",), report)
    for key, value in given.items():
        merged[key] = merge(merged.get(key), value)


def _drop_replaced(
    merged: dict[str, Any],
    given: dict[str, Any],
    pattern: str,
    keys: Sequence[str],
    report: Report,
) -> None:
    """A later pattern of layers replaces the earlier keys for all layers, and they replace it."""
    if given.get(pattern):
        dropped = [key for key in keys if merged.pop(key, None)]
    elif keys[0] in given and pattern not in given:
        dropped = [pattern] if merged.pop(pattern, None) else []
    else:
        return
    if dropped:
        later = pattern if given.get(pattern) else keys[0]
        report.note(f"{', '.join(dropped)}: dropped, because a later source sets {later}")


def _options(encoding: Any) -> set[str]:
    """The options of an encoding; none if it is unknown."""
    return set(options_of(encoding)) if _is_registered(encoding) else set()


def _is_registered(encoding: Any) -> bool:
    return isinstance(encoding, str) and encoding in REGISTRY


def _sections(merged: dict[str, Any], report: Report) -> dict[str, Section]:
    """The sections that have no fault in themselves; the faults of the others are reported."""
    # Where a source could not be read, its keys are not missing.
    incomplete = bool(report.faults)
    unknown = [key for key in merged if key not in KEYS]
    if len(unknown) > faults.MOST_LINES:
        report.fault(f"{len(unknown)} keys do not exist; the first of them follow")
        del unknown[faults.MOST_LINES :]
    known = [*KEYS, *(key.name for key in all_keys()), *NAMES]
    for key in unknown:
        report.fault(faults.unknown(key, known))
    followers = _follow(merged)
    # A misspelt key is not also missing, and a follower is wrong only because its leader is.
    not_missing = {closest(key, KEYS) for key in unknown}
    sections = {}
    for name, section in SECTIONS.items():
        given = {key: merged[key] for key in section.model_fields if key in merged}
        try:
            sections[name] = section.model_validate(given)
        except ValidationError as error:
            for key, kind, line in faults.lines(section, error):
                excused = incomplete or key in not_missing
                if key in followers or (kind == "missing" and excused):
                    continue
                report.fault(line)
    return sections


def _follow(merged: dict[str, Any]) -> set[str]:
    """Give each key that is not set and follows another the other's value; return their names."""
    followers = set()
    for key in all_keys():
        leader = key.follows
        if leader is None or merged.get(key.name) is not None:
            continue
        info = SECTIONS[KEYS[leader]].model_fields[leader]
        merged[key.name] = merged.get(leader, default_of(info))
        followers.add(key.name)
    return followers
