"""What the doctor found, and how much it matters."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "stops"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    level: `stops` would end a run or keep it from starting; `warning` costs speed or some command
    subject: what was looked at, in a word
    text: what is there, and what is wrong with it
    fix: what to do; empty where nothing is wrong
    """

    level: Level
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject:<12} {self.text}"
        return f"{line} - {self.fix}" if self.fix else line

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def ok(subject: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding("ok", subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """A run goes on, slower or without something."""
    return Finding("warning", subject, text, fix)


def stops(subject: str, text: str, fix: str) -> Finding:
    """A run would end or not begin."""
    return Finding("stops", subject, text, fix)
