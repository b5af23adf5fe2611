"""TiktokenTokenizer: a `.tiktoken` file of ranks from the disk, with a pattern that its name tells.

tiktoken itself fetches such files from a network by their names; here nothing is fetched.
"""

import base64
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tiktoken import Encoding

from megatron.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    check_numbers,
    encoding_threads,
    hash_of,
    read_bytes,
)
from megatron.errors import UserError

ENDING = ".tiktoken"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True)
class Published:
    """A vocabulary that OpenAI published.

    pattern: what a text is split by; eod: the id of <|endoftext|>; size: the highest id + 1;
    sha256: of the file of ranks
    cuttable: the pattern is GPT-2's, for which `pieces` knows where a text may be cut
    """

    pattern: str
    eod: int
    size: int
    sha256: str
    cuttable: bool = False


# Facts of tiktoken's own table (tiktoken_ext/openai_public.py of 0.14).
R50K = Published(
    GPT2,
    eod=50256,
    size=50257,
    sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    cuttable=True,
)
PUBLISHED = {
    "gpt2": R50K,
    "r50k_base": R50K,
    "p50k_base": Published(
        GPT2,
        eod=50256,
        size=50281,
        sha256="94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
        cuttable=True,
    ),
    "cl100k_base": Published(
        CL100K,
        eod=100257,
        size=100277,
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": Published(
        O200K,
        eod=199999,
        size=200019,
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
}


class Ranks:
    """A tiktoken encoding. Ids are the library's own; its special tokens are text in documents."""

    name = "TiktokenTokenizer"
    unknown = None

    def __init__(
        self, inner: Encoding, eod: int, vocab_size: int, fingerprint: str, cuttable: bool
    ):
        self.eod = eod
        self.vocab_size = vocab_size
        self.hash = fingerprint
        self.cuttable = cuttable
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return self._inner.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode_ordinary_batch(list(texts), num_threads=encoding_threads())

    def decode(self, ids: Sequence[int]) -> str:
        pieces = []
        for number in ids:
            with contextlib.suppress(KeyError):  # the embedding has more rows than there are tokens
                pieces.append(self._inner.decode_single_token_bytes(int(number)))
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self) -> NDArray[np.int64]:
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for number in range(self.vocab_size):
            with contextlib.suppress(KeyError):
                counts[number] = len(self._inner.decode_single_token_bytes(number))
        counts[self.eod] = 0
        return counts


def ranks(path: Path) -> Ranks:
    """The tokenizer of PATTERN.tiktoken, as published, or of your own NAME.PATTERN.tiktoken.

    In a file of your own <|endoftext|> is the number after the highest rank. UserError for an
    unknown pattern and for files that are damaged.
    """
    stem = path.name.removesuffix(ENDING)
    is_own, _, pattern = stem.rpartition(".")
    if not path.name.endswith(ENDING) or pattern not in PUBLISHED:
        raise UserError(
            f"vocab_file: the name of {path} does not say its pattern, and nothing is fetched -"
            f" give PATTERN{ENDING} as published, or your own mine.PATTERN{ENDING}, of one of"
            f" {', '.join(PUBLISHED)}"
        )
    published = PUBLISHED[pattern]
    content = read_bytes(path, "vocab_file")
    if not is_own and hashlib.sha256(content).hexdigest() != published.sha256:
        raise UserError(
            f"vocab_file: {path} is not the file that was published under that name - copy it"
            f" again, or call a vocabulary of your own mine.{path.name}"
        )
    found: dict[bytes, int] = {}
    try:
        for line in filter(None, content.splitlines()):
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        raise UserError(
            f"vocab_file: {path} is not a file of ranks: {line[:40]!r} should be a token in base64"
            " and its rank - copy it again"
        ) from None
    check_numbers(list(found.values()), path)
    missing = {bytes([byte]) for byte in range(256)} - found.keys()
    if missing:
        raise UserError(
            f"vocab_file: {path} lacks {len(missing)} of the 256 bytes - it is cut off or not a"
            " file of ranks, copy it again"
        )
    eod, size = published.eod, published.size
    if is_own:
        eod = max(found.values()) + 1
        size = eod + 1
    special = {END_OF_DOCUMENT: eod}
    inner = Encoding(stem, pat_str=published.pattern, mergeable_ranks=found, special_tokens=special)
    # The hash names the pattern too: the same ranks with another one give other ids.
    fingerprint = hash_of(content, published.pattern)
    return Ranks(inner, eod, size, fingerprint, published.cuttable)
