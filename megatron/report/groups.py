"""Rows as groups: runs that differ in nothing but their seed."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.report.evidence import Evidence, Found
from megatron.report.figures.curves import variant_of
from megatron.results.labels import axes_of, labels_of, with_sweeps
from megatron.results.row import (
    SETTING,
    VARIANT,
    Row,
    kind_of,
    plain,
    setting_of,
    with_facts,
)

UNKNOWN = "?"
Member = TypeVar("Member")


@dataclass(frozen=True)
class Group:
    """Runs of several seeds: a label, and the rows of every length in the order of the seeds."""

    label: str
    rows: dict[int, list[Row]]

    @property
    def first(self) -> Row:
        return self.all_rows[0]

    @property
    def all_rows(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows]

    @property
    def encoding(self) -> str:
        return self.first["pos_emb"]

    @property
    def variant(self) -> str:
        """How the weights were evaluated, where not in the plain way."""
        return variant_of(self.first)

    @property
    def checkpoints(self) -> list[str]:
        names = dict.fromkeys(row.get("checkpoint", "") for row in self.all_rows)
        return list(names)

    @property
    def seeds(self) -> list[int]:
        seeds = {row.get("seed") for row in self.all_rows}
        return sorted(seed for seed in seeds if seed is not None)

    def evidence(self, evidence: Found) -> list[Evidence]:
        """What is known of the checkpoints of this group, where anything is."""
        return [evidence[name] for name in self.checkpoints if name in evidence]


def groups(rows: Sequence[Row], evidence: Found) -> list[Group]:
    """Put runs together that differ in nothing but their seed.

    Runs of one group have the same encoding, variant and setting. They also share the cell of
    their sweep, but for the seed, or the settings of their configurations where all are known. A
    group never holds two runs of one seed.
    """
    rows = with_sweeps(rows)
    axes = axes_of(rows)
    found: list[list[Row]] = []
    for members in _gathered(rows, lambda row: (kind_of(row, axes), setting_of(row))):
        of_a_sweep = any(row.get("cell") for row in members)
        parts = [members] if of_a_sweep else _by_settings(members, evidence)
        for part in parts:
            found += _by_configuration(part, evidence)
    labels = labels_of([members[0] for members in found], axes=axes)
    pairs = zip(labels, found, strict=True)
    return [Group(label, _by_length(members)) for label, members in pairs]


def models(rows: Sequence[Row], evidence: Found, *, apart: Sequence[str] = ()) -> list[Group]:
    """Group by what was trained, not by what was measured, but for the keys in `apart`."""
    ignored = [key for key in (*SETTING, *VARIANT) if key not in apart]
    facts = dict.fromkeys(ignored)
    return groups([with_facts(row, facts) for row in rows], evidence)


def _gathered(members: Iterable[Member], key: Callable[[Member], Hashable]) -> list[list[Member]]:
    """Lists of the members with the same key, in the order of their first members."""
    found: dict[Hashable, list[Member]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return [*found.values()]


def _by_settings(members: Sequence[Row], evidence: Found) -> list[list[Row]]:
    """Apart by the settings of their configurations, if all of these are known."""
    settings = [_settings(row, evidence) for row in members]
    if not all(settings):
        return [[*members]]
    keys = [_canonical(one) for one in settings]
    pairs = _gathered(zip(keys, members, strict=True), lambda pair: pair[0])
    return [[row for _, row in part] for part in pairs]


def _by_configuration(members: list[Row], evidence: Found) -> list[list[Row]]:
    """Apart by configuration where one seed has two, or where known settings differ."""
    runs = {(row.get("seed"), row["config_hash"]) for row in members}
    seeds = {seed for seed, _ in runs}
    known = {_canonical(_settings(row, evidence)) for row in members if _settings(row, evidence)}
    if len(seeds) == len(runs) and len(known) <= 1:
        return [members]
    return _gathered(members, lambda row: row["config_hash"])


def _settings(row: Row, evidence: Found) -> dict[str, Any]:
    """The settings of a row's configuration without the seed; empty where they are not known."""
    one = evidence.get(row.get("checkpoint", ""))
    return _without_seed(one.settings) if one else {}


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seed"}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _by_length(members: Sequence[Row]) -> dict[int, list[Row]]:
    by_length: dict[int, list[Row]] = {}
    for row in sorted(members, key=lambda row: (row["length"], row.get("seed") or 0)):
        by_length.setdefault(row["length"], []).append(row)
    return by_length


def settings_of(group: Group, evidence: Found) -> dict[str, Any]:
    """The settings of the first checkpoint of a group whose configuration could be read."""
    for one in group.evidence(evidence):
        if one.settings:
            return one.settings
    return {}


def differing(trained: Sequence[Group], evidence: Found) -> dict[str, list[str]]:
    """Settings in which groups differ, but for seeds: {key: the value of each group as text}.

    "?" stands for the value of a group whose configuration is not known.
    """
    settings = [settings_of(group, evidence) for group in trained]
    keys = dict.fromkeys(key for one in settings for key in one if key != "seed")
    table = {}
    for key in keys:
        values = [text_of(one[key]) if key in one else UNKNOWN for one in settings]
        if len({*values} - {UNKNOWN}) > 1:
            table[key] = values
    return table


def text_of(value: Any) -> str:
    """A value of a configuration for people: width 64, slopes none, kernels [exp, gaussian]."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return _canonical(value).replace('"', "")
    if isinstance(value, dict):
        options = [f"{key} {_inside(option)}" for key, option in value.items()]
        return ", ".join(options) or "defaults"
    return plain(value)


def _inside(option: Any) -> str:
    text = text_of(option)
    return f"({text})" if isinstance(option, dict) else text
