"""The kinds of tokenizers, by the names that GPT-NeoX gives them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers import hugging_face, ranks, sentence_pieces
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError, did_you_mean


class Bytes:
    """The bytes of UTF-8: a vocabulary of 512 although there are 256 bytes; 0 ends a document."""

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    unknown = None
    cuttable = True
    hash = hashlib.sha256(b"CharLevelTokenizer 512").hexdigest()[:12]

    def token_bytes(self) -> NDArray[np.int64]:
        is_byte = np.arange(self.vocab_size) < 256
        is_byte[self.eod] = False
        return is_byte.astype(np.int64)

    def encode(self, text: str) -> list[int]:
        return np.frombuffer(text.encode(), dtype=np.uint8).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(byte for byte in ids if byte < 256).decode(errors="replace")


@dataclass(frozen=True)
class Kind:
    """A tokenizer_type.

    build: makes it of its files; files: the keys that name them, with what they are
    """

    build: Callable[..., Tokenizer]
    files: Mapping[str, str] = field(default_factory=dict)


OF_HUGGING_FACE = Kind(
    hugging_face.hugging_face, {"vocab_file": "tokenizer.json, or of a folder that holds it"}
)
KINDS = {
    "GPT2BPETokenizer": Kind(
        hugging_face.gpt2, {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    ),
    "HFTokenizer": OF_HUGGING_FACE,
    "HFGPT2Tokenizer": OF_HUGGING_FACE,  # GPT-NeoX's second name for such a folder
    "SPMTokenizer": Kind(
        sentence_pieces.sentence_pieces, {"vocab_file": "SentencePiece model (tokenizer.model)"}
    ),
    "TiktokenTokenizer": Kind(
        ranks.ranks, {"vocab_file": "file of ranks, such as cl100k_base.tiktoken"}
    ),
    "CharLevelTokenizer": Kind(Bytes),
}
READ_BY = {  # kinds of files by their endings
    ".model": ("SPMTokenizer",),
    ".tiktoken": ("TiktokenTokenizer",),
    ".json": ("HFTokenizer", "HFGPT2Tokenizer", "GPT2BPETokenizer"),
}


def build_tokenizer(
    kind: str, vocab_file: str | Path | None = None, merge_file: str | Path | None = None
) -> Tokenizer:
    """The tokenizer of a tokenizer_type.

    Raises UserError for files that are missing, empty, swapped or of another kind.
    """
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    paths = []
    for key, what in _known(kind).files.items():
        path = given[key]
        if not path:
            raise UserError(f"{key}: {kind} needs one - give the path of its {what}")
        paths.append(Path(path))
        readers = READ_BY.get(paths[-1].suffix, (kind,))
        if kind not in readers:
            raise UserError(
                f"{key}: {kind} does not read {path} - use tokenizer_type: {readers[0]}, which does"
            )
    return _known(kind).build(*paths)


def needs_files(kind: str) -> bool:
    """Whether a tokenizer_type is made of files; UserError for an unknown one."""
    return bool(_known(kind).files)


def same_kind(first: str, second: str) -> bool:
    """Whether two tokenizer_types are one and the same: some have a second name."""
    return first == second or (first in KINDS and KINDS[first] is KINDS.get(second))


def _known(kind: str) -> Kind:
    if kind in KINDS:
        return KINDS[kind]
    guess = did_you_mean(kind, KINDS)
    hint = f"{guess} " if guess else ""
    raise UserError(f"tokenizer_type: there is no '{kind}' - {hint}There are {', '.join(KINDS)}")
