"""JSON without its traps: no NaN, no key twice."""

import json
from typing import Any, NoReturn


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError with a few plain words for anything else.

    Python's own reader takes NaN and keeps the last of two equal keys.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except json.JSONDecodeError as fault:
        raise ValueError(f"it is not JSON ({fault.msg}, column {fault.colno})") from None
    except (UnicodeDecodeError, RecursionError) as fault:
        raise ValueError(f"it is not JSON ({type(fault).__name__})") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is not a number in JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("it has a key twice")
    return mapping
