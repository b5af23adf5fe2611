"""The interface of all tokenizers, their files, and texts too long to encode at once."""

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UserError
from megatron.files import read_small

END_OF_DOCUMENT = "<|endoftext|>"
LARGEST = 1 << 28  # bytes of a tokenizer's file: the largest known has 35 MB
PIECE = 1_000_000  # characters after which a cut is looked for
UNBROKEN = 16_000_000  # characters encoded at once: the library holds some 150 bytes for each
# GPT-2's pattern never joins what is no space to a space that follows, and the only look-ahead,
# of `\s+(?!\S)`, is about what comes after spaces. So a text may be cut there: before a space or a
# line break, after a letter, number, mark of punctuation or symbol. No version of Unicode calls
# one of these a space.
BREAK = re.compile(r"\S(?=[ \n])")
SOLID = frozenset("LNPS")


class Tokenizer:
    """Text to ids and back.

    eod: the id that ends a document; hash: names the contents; vocab_size: the highest id + 1
    unknown: the id of what the vocabulary lacks, or None if it lacks nothing
    cuttable: texts that are cut by `pieces` have the same ids, one after another
    by_words: so have texts that are cut into words by GPT-2's pattern

    Special strings in a text, such as <|endoftext|>, are text: `encode` never gives eod, except for
    a NUL as a byte of CharLevelTokenizer, as in GPT-NeoX.
    """

    name: str
    hash: str
    vocab_size: int
    eod: int
    unknown: int | None = None
    cuttable = False
    by_words = False

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; those without a token have none."""
        raise NotImplementedError

    def token_bytes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes of the text of each id, [vocab_size] int64; special tokens have none.

        None if tokens do not say it.
        """


def description(tokenizer: Tokenizer) -> dict:
    """The entry of checkpoint.json and of PREFIX.json about a tokenizer."""
    return {
        "type": tokenizer.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def encoding_threads() -> int:
    """As many as RAYON_NUM_THREADS says, which limits the `tokenizers` library too; else all cores.

    `prepare_data.py --workers` sets it.
    """
    threads = os.environ.get("RAYON_NUM_THREADS", "")
    limit = int(threads) if threads.isdecimal() else 0
    return limit or len(os.sched_getaffinity(0))


def pieces(text: str, *, where: str, cuttable: bool = True, size: int = PIECE) -> Iterator[str]:
    """A text in pieces of `size` characters or a little more, whose tokens are those of the text.

    cuttable: False: no cut is known to be safe, so the text stays whole
    Raises UserError if a piece would be longer than can be encoded at once.
    """
    cuts = [0]
    start = size
    while cuttable and start < len(text) and (match := BREAK.search(text, start - 1)):
        start = match.end() + 1
        if unicodedata.category(match[0])[0] in SOLID:
            cuts.append(match.end())
            start = match.end() + size
    cuts.append(len(text))
    longest = max(end - start for start, end in pairwise(cuts))
    if longest > UNBROKEN:
        why = "a space or line break" if cuttable else "a place where this tokenizer may be cut"
        raise UserError(
            f"{where}: has {longest:,} characters without {why}, more than the {UNBROKEN:,} that"
            " are encoded at once - remove the document, or cut it into several"
        )
    for start, end in pairwise(cuts):
        yield text[start:end]


# --- Files ---


@contextmanager
def naming_faults(fault: str, fix: str) -> Iterator[None]:
    """Raise UserError "fault: reason - fix" if the library fails.

    It raises bare Exceptions, and panics of Rust, which are not even that.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{fault}: {str(error)[:200]} - {fix}") from None


def read_bytes(path: Path, key: str) -> bytes:
    """The contents of a tokenizer's file; UserError if it cannot be read."""
    try:
        return read_small(path, LARGEST)
    except OSError as fault:
        raise UserError(
            f"{key}: {path} cannot be read ({fault.strerror}; looked from {Path.cwd()}) - give the"
            " path of an existing tokenizer's file"
        ) from None


def read_text(path: Path, key: str) -> str:
    """The same as text, with every line break as \\n."""
    try:
        text = read_bytes(path, key).decode()
    except UnicodeDecodeError:
        raise UserError(f"{key}: {path} is not text - give a tokenizer's file") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def hash_of(*contents: str | bytes) -> str:
    """12 hex digits for the contents of a tokenizer's files."""
    digest = hashlib.sha256()
    for content in contents:
        encoded = content.encode() if isinstance(content, str) else content
        digest.update(hashlib.sha256(encoded).digest())
    return digest.hexdigest()[:12]
