"""The user's own file of encodings: run where the user names it, kept with every checkpoint."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.read import read_overrides
from megatron.errors import UserError
from megatron.files import read_small
from megatron.positions import FILES, fingerprint, load_file

KEY = "pos_emb_file"
COPY = "pos_emb_file.py"
LARGEST = 1 << 24  # bytes of such a file


def run_user_file(sources: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
    """Register the encodings of the file that the last source with this key names; return its text.

    None if no source names a file. Raises UserError if the file cannot be run or, for a source that
    is a checkpoint's config.yml, if the user has not had the same text run.
    """
    naming = [(source, given[KEY]) for source, given in sources if KEY in given]
    if not naming:
        return None
    source, path = naming[-1]
    if not isinstance(path, str):  # the section `position` refuses what is not text
        return None
    if is_checkpoint(source):
        return kept(Path(source).parent)
    return load_file(path)


def run_named(words: Sequence[str]) -> None:
    """Register the encodings of the file that `key=value` words name, before all else is read.

    Words that cannot be read are left to `load`. UserError if the file cannot be run.
    """
    run_user_file([("command line", read_overrides(words, lambda fault: None))])


def kept(folder: Path) -> str:
    """The text in a checkpoint's folder; UserError unless the user has had the same text run."""
    copy = folder / COPY
    try:
        text = read_small(copy, LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{KEY}: {copy} is missing or is not text; copy the checkpoint again"
        ) from None
    if fingerprint(text) in FILES:
        return text
    other = f", and {', '.join(FILES.values())} has another text" if FILES else ""
    raise UserError(
        f"{KEY}: {copy} defines this checkpoint's encoding{other}; code that lies in a checkpoint"
        f" is not run unasked: read it, then write {KEY}={copy} on the command line"
        f" (to a tool --from {copy}), or name your own file with the same text"
    )


def is_checkpoint(source: str) -> bool:
    """Whether a source is the config.yml of a checkpoint."""
    # os.path, not Path's methods: these raise for a name that is too long.
    beside = Path(source).parent / "checkpoint.json"
    return os.path.isfile(source) and os.path.exists(beside)
