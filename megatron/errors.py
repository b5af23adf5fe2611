"""The error for mistakes that users can fix, advice for disk faults, and suggestions for names."""

import difflib
import errno
import re
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path

SPACE = "free some space, or choose another disk"
RIGHTS = "check who may read and write there, or choose another place"
CURES = {
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EACCES: RIGHTS,
    errno.EPERM: RIGHTS,
    errno.EROFS: RIGHTS,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""Advice for faults of disks and paths, by errno."""
OF_TRAIN = {
    "backports",
    "datasets",
    "deepspeed",
    "huggingface_hub",
    "jinja2",
    "lm_dataformat",
    "matplotlib",
    "pyarrow",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "tqdm",
    "transformers",
    "wandb",
}
"""Packages that we import but `pip install .` does not install: pyproject.toml's extra `train`."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, reverse a line, or cannot be printed."""


class UserError(ValueError):
    """A fault in the user's input.

    Entry scripts print it as one message, without a traceback, and exit with status 1. The text
    says where the fault is, what is wrong, and how to fix it.
    """


def missing_package(fault: BaseException) -> str | None:
    """Which package is missing and how to install it; None for another fault."""
    if not isinstance(fault, ModuleNotFoundError):
        return None
    package = str(fault.name).partition(".")[0]
    if package not in OF_TRAIN:
        return None
    return f"{package} is not installed - pip install '.[train]' in the project's folder"


def cure(fault: Exception) -> str:
    """Advice for a fault of a disk or a path."""
    return CURES.get(getattr(fault, "errno", None) or 0, "check the path, or choose another place")


def cannot_write(place: str | Path, fault: Exception) -> UserError:
    """The error that says what cannot be written, why, and what to do.

    place: the key or option with its file or folder: `save: runs/mep`
    """
    return UserError(f"{place}: cannot be written ({in_words(fault)}) - {cure(fault)}")


def in_words(fault: Exception) -> str:
    """A fault of a library or of the system on one line, for a warning."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    if type(fault).__name__ == "ValidationError":  # pydantic's, which an exported model may lack
        (first, *_) = fault.errors()  # pyright: ignore
        place = ".".join(map(str, first["loc"])) or "the file"
        return f"{place}: {first['msg']}"
    lines = str(fault).strip().splitlines()
    return lines[0] if lines else type(fault).__name__


def fault_in(files: Collection[str], fault: BaseException) -> str | None:
    """`mine.py:3 stops with NameError: …`: the deepest line of a fault in these files, or None."""
    for frame in reversed(traceback.extract_tb(fault.__traceback__)):
        if frame.filename in files:
            reason = f"{type(fault).__name__}: {fault}"
            return f"{frame.filename}:{frame.lineno} stops with {reason}"
    return None


def visible(text: str) -> str:
    """The text with control characters written as \\x1b, except those that end lines.

    A file name from elsewhere must not colour, clear or rewrite the screen.
    """
    return CONTROL.sub(
        lambda match: match[0] if match[0] in "\n\t" else ascii(match[0])[1:-1], text
    )


def control_fault(value: object) -> str | None:
    """The fault of nested values if a text has a control character, which rows cannot store."""
    if isinstance(value, str) and CONTROL.search(value):
        return (
            f"{ascii(value)[:80]} has a control character, which result rows cannot contain -"
            " remove it"
        )
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return next(filter(None, map(control_fault, value)), None)
    return None


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name in `names` that is most similar to `name`, ignoring case; None if none is."""
    by_lower_case = {spelling.lower(): spelling for spelling in names}
    matches = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean X?` with the most similar name; empty if none is similar."""
    match = closest(name, names)
    return f"did you mean {match}?" if match else ""
