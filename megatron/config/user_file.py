"""The user's own file of encodings: run where the user names it, kept with every checkpoint, never run from there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.positions import FILES, fingerprint, load_file

KEY = "pos_emb_file"
COPY = "pos_emb_file.py"


def code_of(
    sources: Sequence[tuple[str, dict[str, Any]]], complain: Callable[[str], None]
) -> str | None:
    """The text of the file that the last source with this key names, once its encodings are registered."""
    named = [(source, given[KEY]) for source, given in sources if KEY in given]
    if not named or not isinstance(named[-1][1], str):
        return None
    source, path = named[-1]
    try:
        return kept(Path(source).parent) if _of_checkpoint(source) else load_file(path)
    except UserError as fault:
        complain(str(fault))
        return None


def kept(folder: Path) -> str:
    """The text in a checkpoint's folder; UserError unless the user has had the same text run, from wherever."""
    copy = folder / COPY
    try:
        text = copy.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{KEY}: {copy} is missing or is not text; copy the checkpoint again"
        ) from None
    if fingerprint(text) in FILES:
        return text
    other = f", and {', '.join(FILES.values())} says something else" if FILES else ""
    raise UserError(
        f"{KEY}: {copy} defines this checkpoint's encoding{other}; code that lies in a checkpoint is not run unasked:"
        f" read it, then write {KEY}={copy} on the command line (to a tool --from {copy}),"
        " or name your own file with the same text"
    )


def _of_checkpoint(source: str) -> bool:
    return Path(source).is_file() and (Path(source).parent / "checkpoint.json").exists()
