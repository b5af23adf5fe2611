"""The error that a user can cause and mend, and the name that a misspelt one probably means."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A fault in what the user gave.

    Entries print it as one message, without a traceback, and exit with status 1.
    The text says where, what, and how to fix it.
    """


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is spelled most like `name`, whatever the case; None if none is."""
    by_lower_case = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean X?`, with the name that is spelled most like `name`; empty if none is close."""
    match = closest(name, names)
    return f"did you mean {match}?" if match else ""
