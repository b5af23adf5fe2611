"""JSON without its traps: no NaN, no infinity, no key twice, no half characters, bounded depth."""

import json
import math
from typing import Any, NoReturn

DEPTH = 64  # of lists and objects in each other; our own files have three


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError with a few plain words for anything else.

    Python's own reader takes NaN, turns 1e999 into infinity, keeps the last of two equal keys, and
    leaves half of a surrogate pair in a string, which no file or terminal takes.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique
        )
    except json.JSONDecodeError as fault:
        raise ValueError(f"it is no JSON ({fault.msg}, column {fault.colno})") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as fault:
        if "integer string conversion" in str(fault):  # more than 4300 digits
            raise ValueError("it has a number of thousands of digits") from None
        raise
    _check_depth(value)
    escape = "\\ud" if isinstance(text, str) else b"\\ud"
    if escape in text.lower():  # type: ignore[operator]
        _check_characters(value)
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is no number in JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it has {digits[:40]}, which is too large for a number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {ascii(twice)[:60]} twice")
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                deeper += (child for child in one.values() if isinstance(child, dict | list))
            elif isinstance(one, list):
                deeper += (child for child in one if isinstance(child, dict | list))
        if not deeper:
            return
        level = deeper
    raise ValueError("it is nested too deeply")


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has half a character (a single surrogate)") from None
