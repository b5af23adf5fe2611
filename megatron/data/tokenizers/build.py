"""The kinds of tokenizers, by GPT-NeoX's names."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers.hugging_face import gpt2, hugging_face
from megatron.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    encoding_threads,
    hash_of,
    naming_faults,
    read_bytes,
)
from megatron.errors import UserError, did_you_mean
from megatron.files import ROOT


class Bytes(Tokenizer):
    """The bytes of UTF-8; the vocabulary has 512 entries although there are 256 bytes; 0 ends a
    document."""

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    hash = hashlib.sha256(b"CharLevelTokenizer 512").hexdigest()[:12]

    def token_bytes(self) -> NDArray[np.int64]:
        counts = np.zeros(self.vocab_size, np.int64)
        counts[1:256] = 1
        return counts

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(byte for byte in ids if byte < 256).decode(errors="replace")


# --- Tiktoken's files of ranks ---


class PublishedRanks(NamedTuple):
    """A vocabulary that OpenAI published.

    pattern: how a text is split; eod: the id of <|endoftext|>; size: the highest id + 1
    sha256: of the file of ranks
    """

    pattern: str
    eod: int
    size: int
    sha256: str


@cache
def published_ranks() -> dict[str, PublishedRanks]:
    """The vocabularies by name, with the facts of tiktoken's own table."""
    rows = json.loads((ROOT / "configs/tokenizers/tiktoken.json").read_text(encoding="utf-8"))
    return {name: PublishedRanks(**row) for name, row in rows.items()}


class Ranks(Tokenizer):
    """The tokenizer of a published PATTERN.tiktoken, or of your own NAME.PATTERN.tiktoken.

    Unlike tiktoken, we never download such files. In your own file, <|endoftext|> is the number
    after the highest rank. Special tokens in documents are plain text. UserError for an unknown
    pattern and for damaged files.
    """

    name = "TiktokenTokenizer"

    def __init__(self, path: Path) -> None:
        import tiktoken  # not everyone has the packages of other kinds

        stem = path.name.removesuffix(".tiktoken")
        is_own, _, pattern = stem.rpartition(".")
        known_patterns = published_ranks()
        published = known_patterns.get(pattern)
        if published is None:
            raise UserError(
                f"vocab_file: the name of {path} must contain its pattern - name it"
                " PATTERN.tiktoken if it is published, or mine.PATTERN.tiktoken if it is your own,"
                f" where PATTERN is one of {', '.join(known_patterns)}"
            )
        content = read_bytes(path, "vocab_file")
        ranks = {}
        fix = f"copy it again, or, if it is your own vocabulary, rename it to mine.{path.name}"
        with naming_faults(f"vocab_file: {path} is not the expected file of ranks", fix):
            if not is_own and hashlib.sha256(content).hexdigest() != published.sha256:
                raise ValueError("not the published one")
            for line in filter(None, content.splitlines()):
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            if not ranks.keys() >= {bytes([byte]) for byte in range(256)}:
                raise ValueError("it lacks some of the 256 bytes")
        self.eod, self.vocab_size = published.eod, published.size
        if is_own:
            self.eod = max(ranks.values()) + 1
            self.vocab_size = self.eod + 1
        # The hash includes the pattern: the same ranks with another pattern give other ids.
        self.hash = hash_of(content, published.pattern)
        self._inner = tiktoken.Encoding(
            stem,
            pat_str=published.pattern,
            mergeable_ranks=ranks,
            special_tokens={END_OF_DOCUMENT: self.eod},
        )
        # The embedding may have more rows than there are tokens.
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes[self.eod] = END_OF_DOCUMENT.encode()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode_ordinary_batch(list(texts), num_threads=encoding_threads())

    def decode(self, ids: Sequence[int]) -> str:
        tokens = (self._bytes.get(int(number), b"") for number in ids)
        return b"".join(tokens).decode(errors="replace")

    def token_bytes(self) -> NDArray[np.int64]:
        counts = np.array([len(self._bytes.get(number, b"")) for number in range(self.vocab_size)])
        counts[self.eod] = 0
        return counts


# --- SentencePiece ---


class SentencePieces(Tokenizer):
    """The tokenizer of a SentencePiece model, without begin-of-sentence and end-of-sentence tokens.

    Documents end with <|endoftext|> if the model has it, else with its end of a sentence, usually
    </s>. Most models normalise the text (NFKC, spaces): `decode` returns the normalised text, and
    pieces don't tell how many bytes they had. UserError for a model without an end token and for
    files that are not models.
    """

    name = "SPMTokenizer"

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        # The package makes its names when it is imported.
        from sentencepiece.sentencepiece_model_pb2 import (
            ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
        )

        content = read_bytes(path, "vocab_file")
        # Llama 3's original/tokenizer.model holds ranks.
        fix = "copy it again; instead of tiktoken's ranks use the tokenizer.json (HFTokenizer)"
        with naming_faults(f"vocab_file: {path} is not a SentencePiece model", fix):
            model = ModelProto.FromString(content)
            self.eod = SentencePieceProcessor(model_proto=content).eos_id()
        for number, piece in enumerate(model.pieces):
            if piece.piece == END_OF_DOCUMENT:
                self.eod = number
        if self.eod < 0:
            raise UserError(
                f"vocab_file: {path} has neither {END_OF_DOCUMENT} nor an end of a sentence, but"
                " every document needs an end token - train it with"
                f" control_symbols={END_OF_DOCUMENT}"
            )
        # A piece of any other type is found in documents too, so a document could contain its own
        # end.
        model.pieces[self.eod].type = ModelProto.SentencePiece.CONTROL
        self._inner = SentencePieceProcessor(model_proto=model.SerializeToString())
        self.content = content
        self.hash = hash_of(content)
        self.vocab_size = self._inner.get_piece_size()
        self.unknown = self._inner.unk_id()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode(list(texts), num_threads=encoding_threads())

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([int(number) for number in ids if number < self.vocab_size])

    @property
    def end_of_document(self) -> str:
        return self._inner.id_to_piece(self.eod)


# --- By name ---

OF_HUGGING_FACE = (hugging_face, {"vocab_file": "tokenizer.json, or of a folder that holds it"})
KINDS: dict[str, tuple[Any, dict[str, str]]] = {
    "GPT2BPETokenizer": (gpt2, {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
    "HFTokenizer": OF_HUGGING_FACE,
    "HFGPT2Tokenizer": OF_HUGGING_FACE,  # GPT-NeoX's second name for such a folder
    "SPMTokenizer": (SentencePieces, {"vocab_file": "SentencePiece model (tokenizer.model)"}),
    "TiktokenTokenizer": (Ranks, {"vocab_file": "file of ranks, such as cl100k_base.tiktoken"}),
    "CharLevelTokenizer": (Bytes, {}),
}
"""For each tokenizer_type: the function that builds it from its files, and the keys of these
files."""


def build_tokenizer(
    kind: str, vocab_file: str | Path | None = None, merge_file: str | Path | None = None
) -> Tokenizer:
    """The tokenizer for a tokenizer_type.

    Raises UserError for files that are missing, empty, swapped or of another kind, and if a package
    is not installed.
    """
    if kind not in KINDS:
        guess = did_you_mean(kind, KINDS)
        raise UserError(
            f"tokenizer_type: there is no '{kind}' - {guess} The types are {', '.join(KINDS)}"
        )
    build, files = KINDS[kind]
    paths = []
    for (key, what), path in zip(files.items(), (vocab_file, merge_file), strict=False):
        if not path:
            raise UserError(
                f"{key}: is not set, but {kind} needs it - set it to the path of its {what}"
            )
        paths.append(Path(path))
    return build(*paths)


def needs_files(kind: str) -> bool:
    """Whether a tokenizer_type needs files."""
    return kind not in KINDS or bool(KINDS[kind][1])
