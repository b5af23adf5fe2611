"""One published file in today's spelling, with comments that say what became of its keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.config.faults import Report, bad_configuration, shortened
from megatron.config.legacy import SWITCHED_OFF, fold, translate
from megatron.config.published_names import mixture_named
from megatron.config.read import find_file, read_file, read_text
from megatron.config.recipe_2022 import complete_recipe
from megatron.errors import UserError
from megatron.positions import ALIASES, options_of

WIDTH = 100
# Spellings of the MEP fork that hide a mixture.
HIDE_MIXTURE = "snope"


@dataclass(frozen=True)
class Migrated:
    """A file, its text, and the text in today's spelling."""

    path: Path
    before: str
    text: str


def migrated(name: str | Path) -> Migrated:
    """Read one file and spell it as today; the file stays. UserError where it cannot be read."""
    try:
        path = find_file(name)
        source, before = read_file(path), read_text(path)
    except ValueError as fault:
        raise UserError(str(fault)) from None
    report = Report()
    published = source.get("pos_emb")
    given = translate(source, report)
    off = given.pop(SWITCHED_OFF, [])
    if off:
        given.setdefault("precision", "fp32")
    complete_recipe([source], given, report)
    if isinstance(given.get("pos_emb"), str):
        _fold(given, report)
    if report.faults:
        raise bad_configuration([str(path)], report.faults)
    comments = list(report.notes)
    if isinstance(published, str) and published.startswith(HIDE_MIXTURE) and published in ALIASES:
        comments = [note for note in comments if not note.startswith(f"pos_emb: {published}")]
        comments += _mixture(given, path.stem, published)
    return Migrated(path, before, _as_yaml(path, given, comments))


def _fold(given: dict[str, Any], report: Report) -> None:
    try:
        known = set(options_of(given["pos_emb"]))
    except UserError as fault:
        report.fault(str(fault))
        return
    fold(given, known, report)


def _mixture(given: dict[str, Any], stem: str, published: str) -> list[str]:
    """Set explicit kernels where the file's name tells them; the comments about it."""
    released = given["pos_emb"]
    default = options_of(released)["kernels"].default
    computes = f"the released code computes kernels: {_flow([*default])} for every {published}"
    named = mixture_named(stem, published)
    if named.options is None:
        return [
            f"pos_emb: the file's name does not say which kernels were meant: {named.why_not}",
            f"pos_emb: {released} is kept: {computes}",
        ]
    given["pos_emb"], given["pos_emb_args"] = "mep", named.options
    agree = sorted(map(str, named.options["kernels"])) == sorted(map(str, default))
    relation = "which is the same" if agree and len(named.options) == 1 else "which differs"
    return [
        f"pos_emb: kernels were derived from the file's name {shortened(stem)}; check them",
        f"pos_emb: {computes}, {relation}",
    ]


def _as_yaml(path: Path, given: dict[str, Any], comments: list[str]) -> str:
    lines = [f"# {shortened(path.name)} in today's spelling, by tools/migrate_config.py."]
    lines += [f"# {comment}" for comment in comments]
    for key, value in given.items():
        if isinstance(value, dict):
            lines.append(f"{key}: {_flow(dict(value))}")
        else:
            lines.append(yaml.safe_dump({key: value}, allow_unicode=True, width=WIDTH).rstrip())
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.strip()
