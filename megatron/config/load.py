"""From files and overrides to one checked Config; every fault in a single message."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config import faults
from megatron.config.config import Config, message
from megatron.config.cross_checks import check_together
from megatron.config.legacy import NAMES, Report, fold, switch_off, translate
from megatron.config.read import find_file, merge, read_file, read_overrides
from megatron.config.schema import KEYS, SECTIONS, Position, all_keys
from megatron.config.user_file import code_of
from megatron.errors import UserError
from megatron.positions import REGISTRY, options_of


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files from left to right, then `key=value` words; check all of it; UserError with every fault."""
    report = Report()
    sources, merged = _sources(paths, overrides, report), {}
    code = code_of(
        sources, report.fault
    )  # first of all: what it registers may be what pos_emb names
    for _, given in sources:
        _take(merged, given, report)
    merged.setdefault("pos_emb", Position.model_fields["pos_emb"].default)
    fold(merged, _options(merged["pos_emb"]), report)
    sections = _sections(merged, report)
    check_together(sections, merged, report)
    names = [name for name, _ in sources]
    if report.faults:
        raise UserError(message(names, report.faults))
    said = {"sources": tuple(names), "notes": tuple(report.notes)}
    return Config(**sections, pos_emb_code=code, **said)  # pyright: ignore[reportArgumentType]


def _sources(
    paths: Sequence[str | Path], overrides: Sequence[str], report: Report
) -> list[tuple[str, dict[str, Any]]]:
    """(name, what it says) of each file and of the command line; what cannot be read is a fault."""
    if isinstance(paths, (str, Path)):
        raise TypeError(f"load takes a list of files, not {paths!r}")
    sources = []
    for path in paths:
        try:
            file = find_file(path)
            sources.append((str(file), read_file(file)))
        except ValueError as fault:
            report.fault(str(fault))
            sources.append((str(path), {}))
    if overrides:
        sources.append(("command line", read_overrides(overrides, report.fault)))
    return sources


def _take(merged: dict[str, Any], given: dict[str, Any], report: Report) -> None:
    """Let one source speak over the earlier ones."""
    given = translate(given, report)
    switch_off(merged, given, report)
    before = merged.get("pos_emb")
    if (
        "pos_emb" in given
        and before not in (None, given["pos_emb"])
        and merged.pop("pos_emb_args", None)
    ):
        report.note(
            f"pos_emb_args of {before} are dropped, because a later source sets pos_emb: {given['pos_emb']}"
        )
    for key, value in given.items():
        merged[key] = merge(merged.get(key), value)


def _options(encoding: Any) -> set[str]:
    return (
        set(options_of(encoding)) if isinstance(encoding, str) and encoding in REGISTRY else set()
    )


def _sections(merged: dict[str, Any], report: Report) -> dict[str, Any]:
    """Every section that is right in itself; the faults of the others are reported."""
    incomplete = bool(report.faults)  # a key may stand in what could not be read
    wrong = [key for key in merged if key not in KEYS]
    meant = {faults.suggestion(key, KEYS) for key in wrong}
    for key in wrong:
        report.fault(faults.unknown(key, [*KEYS, *(key.name for key in all_keys()), *NAMES]))
    followers = _follow(merged)
    sections = {}
    for name, section in SECTIONS.items():
        try:
            sections[name] = section.model_validate(
                {key: merged[key] for key in section.model_fields if key in merged}
            )
        except ValidationError as found:
            for line, error in zip(faults.lines(section, found), found.errors(), strict=True):
                key, missing = error["loc"][0], error["type"] == "missing"
                # A follower is wrong only because its leader is, and a misspelt key is not also missing.
                if key not in followers and not (missing and (incomplete or key in meant)):
                    report.fault(line)
    return sections


def _follow(merged: dict[str, Any]) -> set[str]:
    """Fill in keys that are not given and whose default is the value of another key; give their names."""
    followers = {
        key.name: key.follows for key in all_keys() if key.follows and merged.get(key.name) is None
    }
    for name, leader in followers.items():
        merged[name] = merged.get(leader, _default(leader))
    return set(followers)


def _default(name: str) -> Any:
    info = SECTIONS[KEYS[name]].model_fields[name]
    return None if info.is_required() else info.get_default()
