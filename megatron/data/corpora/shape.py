"""Documents from text that comes as lines of articles, or as one long text."""

import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from megatron.errors import UserError
from megatron.files import atomic_write


def articles(rows: Iterable[str], beginning: str) -> Iterator[str]:
    """Rows joined to articles; a row that fits the expression `beginning` begins one."""
    begins = re.compile(beginning)
    article: list[str] = []
    for row in rows:
        if begins.fullmatch(row) and any(part.strip() for part in article):
            yield "".join(article)
            article = []
        article.append(row)
    if article:
        yield "".join(article)


def cut(path: Path, lengths: Sequence[int], folder: Path) -> list[Path]:
    """The one file of a zip archive, cut into text files of these bytes in a folder.

    A cut inside a character of UTF-8 moves behind it. Raises UserError for another archive.
    """
    pieces = [folder / f"{path.stem}.{number}.txt" for number in range(len(lengths))]
    sizes = [piece.stat().st_size for piece in pieces if piece.is_file()]
    if len(sizes) == len(pieces) and sum(sizes) == sum(lengths):
        return pieces
    try:
        with zipfile.ZipFile(path) as archive:
            [member] = archive.infolist()
            if member.file_size != sum(lengths):
                raise UserError(
                    f"{path}: holds {member.file_size:,} bytes, not {sum(lengths):,} - it is"
                    " another file than the recipe's: get it again"
                )
            text = archive.read(member)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, zlib.error) as fault:
        if isinstance(fault, UserError):
            raise
        raise UserError(f"{path}: is no zip archive of one file ({fault}) - get it again") from None
    start = 0
    for piece, planned in zip(pieces, accumulate(lengths), strict=True):
        end = _whole_character(text, planned)
        with atomic_write(piece) as temporary:
            temporary.write_bytes(text[start:end])
        start = end
    return pieces


def _whole_character(text: bytes, end: int) -> int:
    while end < len(text) and text[end] & 0b1100_0000 == 0b1000_0000:  # the rest of a character
        end += 1
    return end
