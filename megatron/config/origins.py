"""Where the value of each key came from: a file, the command line, or nobody."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from megatron.config.faults import Report, shortened
from megatron.config.keys import Key, all_keys
from megatron.config.legacy import AFTER_MERGE, NAMES, translate
from megatron.config.published_encodings import OF_ENCODINGS
from megatron.config.schema import KEYS

RECIPE = "the recipe of 2022"
BECOME = {
    **dict.fromkeys(OF_ENCODINGS, "pos_emb_args"),
    "rms_norm_epsilon": "layernorm_epsilon",
    "mlp_multiple_of": "intermediate_size",
}
"""What older keys become whose meaning other sources decide; see legacy.fold."""
MISSING = object()


@dataclass(frozen=True)
class Origin:
    """Who set a key.

    source: a file, or `command line`
    spelled: how it is written there, where that is an older spelling: `bf16: {'enabled': True}`
    """

    source: str
    spelled: str = ""

    def __str__(self) -> str:
        return f"{self.source}, written as {self.spelled}" if self.spelled else self.source


class Origins:
    """Follows `load`: give its method `after` as `trace`.

    of: {key's name with dots: its origin}, without keys that nobody set
    """

    def __init__(self) -> None:
        self.of: dict[str, Origin] = {}
        self._before: dict[str, Any] = {}
        self._older: dict[str, Origin] = {}  # keys that are converted when all is merged

    def after(self, source: str | None, given: dict[str, Any], merged: dict[str, Any]) -> None:
        """Note what one source has set. None: older keys have been converted."""
        now = _values(merged)
        if source is None:
            self._converted(now)
        else:
            self._laid(source, given, now)
        self.of = {name: origin for name, origin in self.of.items() if name in now}
        self._before = now

    def described(self, key: Key) -> str:
        """The origin of a key in words."""
        origin = self.of.get(key.name)
        if origin is not None:
            return str(origin)
        return f"default, follows {key.follows}" if key.follows else "default"

    def _laid(self, source: str, given: dict[str, Any], now: Mapping[str, Any]) -> None:
        as_written = _values(given)
        today = _values(_translated(given))
        for name, value in now.items():
            if name not in today and self._before.get(name, MISSING) == value:
                continue
            written_so = name in as_written and as_written[name] == today.get(name, MISSING)
            spelled = "" if written_so else _spelled(name, given, today)
            self.of[name] = Origin(source, spelled)
        for key in AFTER_MERGE:
            if key in given:
                self._older[key] = Origin(source, _shown(key, given[key]))

    def _converted(self, now: Mapping[str, Any]) -> None:
        for name, value in now.items():
            if self._before.get(name, MISSING) == value:
                continue
            older = [origin for key, origin in self._older.items() if BECOME.get(key) == name]
            if older:
                sources = dict.fromkeys(origin.source for origin in older)
                spellings = [origin.spelled for origin in older]
                self.of[name] = Origin(", ".join(sources), ", ".join(spellings))
            elif name in KEYS and name not in self.of and name != "pos_emb":
                self.of[name] = Origin(RECIPE)


def _spelled(name: str, given: dict[str, Any], today: Mapping[str, Any]) -> str:
    """The settings without which a source would not set this key so."""
    causes = []
    for key in given:
        if key not in NAMES and key not in KEYS:
            continue
        rest = {other: value for other, value in given.items() if other != key}
        without = _values(_translated(rest))
        if without.get(name, MISSING) != today.get(name, MISSING):
            causes.append(_shown(key, given[key]))
    return ", ".join(causes)


def _shown(key: str, value: Any) -> str:
    return f"{key}: {shortened(str(value))}"


def _translated(given: dict[str, Any]) -> dict[str, Any]:
    """A source in today's spelling; its faults are those that `load` reports."""
    return translate(deepcopy(given), Report())


def _values(merged: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those keys that are set, by their names with dots."""
    values = {}
    for key in all_keys():
        value: Any = merged
        for part in key.name.split("."):
            value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            values[key.name] = deepcopy(value)
    return values
