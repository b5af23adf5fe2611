"""Messages about a configuration: faults and notes that say what to write instead."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from megatron.errors import UserError, closest

WHY = {
    "attention_dropout": "the attention backends have no dropout on probabilities",
    "pipe_parallel_size": "pipeline stages are not supported; to divide the layers' memory, set"
    " zero_optimization.stage: 3, and for frameworks that have them, use"
    " tools/export_checkpoint.py",
    "tokenizer_type": "convert other tokenizers to a tokenizer.json for HFTokenizer",
}
EXPECTED = {  # pydantic's kind of error -> what the key takes
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "dict_type": "a mapping such as {{key: value}}",
    "model_type": "a mapping such as {{key: value}}",
    "list_type": "a list",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "letters of ABCD, each once and in this order",
    "literal_error": "{expected}",
    "greater_than": "> {gt:.13g}",
    "greater_than_equal": ">= {ge:.13g}",
    "less_than": "< {lt:.13g}",
    "less_than_equal": "<= {le:.13g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


class Report:
    """Faults and notes, each listed once, in order of appearance."""

    def __init__(self) -> None:
        self.faults: dict[str, None] = {}
        self.notes: dict[str, None] = {}

    def fault(self, text: str) -> None:
        self.faults[text] = None

    def note(self, text: str) -> None:
        self.notes[text] = None

    def no_effect(self, key: str, why: str) -> None:
        self.note(f"{key}: accepted, has no effect here: {why}")


def bad_configuration(sources: Sequence[str], faults: Iterable[str]) -> UserError:
    """One error that lists all faults under the sources they come from."""
    names = ", ".join(sources) or "nothing given"
    return UserError("\n  ".join([f"bad configuration ({names})", *faults]))


def contradiction(*settings: str) -> str:
    """The fault of settings that exclude each other."""
    return f"{' and '.join(settings)} contradict each other; keep one of them"


def no_such_key(key: str, names: Sequence[str]) -> str:
    """The message about a key that doesn't exist; names: the existing keys."""
    nested = [name for name in names if name.endswith(f".{key}")]
    match = nested[0] if nested else closest(key[:80], names)
    hint = f"did you mean {match}?" if match else "configs/README.md lists all keys"
    return f"{key:.80}: no such key; {hint}"


def lines(error: ValidationError, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(key of the section, pydantic's kind of error, line) of each key with a fault.

    A line names the key as it is written in YAML, and all kinds of values that it takes.
    names: keys that exist, with dots for nested ones
    """
    by_key: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        # Without places in a list, and without a union's branches, such as bool or literal['a'].
        words = [str(part) for part in detail["loc"]]
        parts = [word for word in words if not re.search(r"\[|^(str|bool|\d+)$", word)]
        by_key.setdefault(".".join(parts), []).append(detail)
    faults = []
    for key, details in by_key.items():
        kind, value = details[0]["type"], details[0]["input"]
        if kind == "missing":
            line = f"{key}: is not set, and every model needs it"
        elif kind == "extra_forbidden":
            line = no_such_key(key, names)
        else:
            expected = {}
            for detail in details:
                text = EXPECTED.get(detail["type"], "{}")
                text = text.format(detail["msg"], **detail.get("ctx", {}))
                expected[text.replace("'", "")] = None
            words = {"None": "nothing", "True": "true", "False": "false"}
            shown = words.get(repr(value), repr(value))
            line = f"{key}: must be {' or '.join(expected)}, got {shown:.80}"
            if key in WHY:
                line += f"; {WHY[key]}"
        faults.append((key.split(".")[0], kind, line))
    return faults
