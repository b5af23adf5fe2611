"""JSON without its traps: no NaN, no infinity, no key twice, no half characters."""

import json
import math
from typing import Any, NoReturn


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError with a few plain words for anything else.

    Python's own reader takes NaN, turns 1e999 into infinity, keeps the last of two equal keys, and
    leaves half of a surrogate pair in a string, which no file or terminal takes.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique
        )
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as fault:
        raise ValueError(f"it is no JSON ({fault.msg}, column {fault.colno})") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except (UnicodeEncodeError, RecursionError) as fault:
        raise ValueError(f"it cannot be written again ({type(fault).__name__})") from None
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is no number in JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse(digits[:40])
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("it has a key twice")
    return mapping
