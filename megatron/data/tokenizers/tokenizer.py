"""The interface of all tokenizers, and their files."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UserError
from megatron.files import read_small

END_OF_DOCUMENT = "<|endoftext|>"
LARGEST = 1 << 28  # bytes of a tokenizer's file: the largest we know has 35 MB


class Tokenizer:
    """Text to ids and back.

    eod: the id that ends a document; hash: identifies the contents; vocab_size: the highest id + 1
    unknown: the id for text outside the vocabulary, or None if there is none
    by_words: whether words, cut by GPT-2's pattern, get the same ids as the whole text

    Special strings in a text, such as <|endoftext|>, are text: `encode` never gives eod, except for
    a NUL as a byte of CharLevelTokenizer, as in GPT-NeoX.
    """

    name: str
    hash: str
    vocab_size: int
    eod: int
    unknown: int | None = None
    by_words = False

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; ids without a token add nothing."""
        raise NotImplementedError

    def token_bytes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes of the text of each id, [vocab_size] int64; special tokens have none.

        None if tokens don't determine it.
        """


def description(tokenizer: Tokenizer) -> dict:
    """The entry about a tokenizer in checkpoint.json and PREFIX.json."""
    return {
        "type": tokenizer.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def encoding_threads() -> int:
    """The number in RAYON_NUM_THREADS, which also limits the `tokenizers` library; else all cores.

    `prepare_data.py --workers` sets it.
    """
    threads = os.environ.get("RAYON_NUM_THREADS", "")
    limit = int(threads) if threads.isdecimal() else 0
    return limit or len(os.sched_getaffinity(0))


# --- Files ---


@contextmanager
def naming_faults(fault: str, fix: str) -> Iterator[None]:
    """Raise UserError "fault: reason - fix" if the library fails.

    It raises bare Exceptions and Rust panics, which are not even Exceptions.
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
    """The contents as text, with every line break as \\n."""
    try:
        text = read_bytes(path, key).decode()
    except UnicodeDecodeError:
        raise UserError(f"{key}: {path} is not text - give a tokenizer's file") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def hash_of(*contents: str | bytes) -> str:
    """12 hex digits that identify the contents of a tokenizer's files."""
    digest = hashlib.sha256()
    for content in contents:
        encoded = content.encode() if isinstance(content, str) else content
        digest.update(hashlib.sha256(encoded).digest())
    return digest.hexdigest()[:12]
