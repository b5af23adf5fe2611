"""Tokenizers of the Hugging Face `tokenizers` library.

GPT2BPETokenizer reads OpenAI's vocab.json and merges.txt. HFTokenizer reads a tokenizer.json, or a
folder that has one.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    hash_of,
    naming_faults,
    read_text,
)
from megatron.errors import UserError

if TYPE_CHECKING:
    import tokenizers

WHOLE = "tokenizer.json"
BESIDE = "tokenizer_config.json"  # Hugging Face's file next to tokenizer.json
METASPACE = "▁"  # how SentencePiece writes a space
BYTES_OF_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPLITS = ("ByteLevel", "Digits", "Punctuation", "Split", "Metaspace")  # these lose nothing
# A made-up unknown token for a BPE without one: it is in no vocabulary, so the library raises an
# error instead of skipping text.
NO_TOKEN = "<megatron: no token>"
MARKS_SPACES = (
    {"type": "Prepend", "prepend": METASPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE},
)


class Subwords(Tokenizer):
    """A tokenizer of the Hugging Face `tokenizers` library."""

    def __init__(self, name: str, inner: "tokenizers.Tokenizer", eod: int, fingerprint: str):
        from tokenizers import models  # not everyone has this package

        # A tokenizer.json may request truncation or padding, but documents must stay whole.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # a document never contains its own end
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None  # dropout would make ids random
        parts = json.loads(inner.to_str())
        unknown = parts["model"].get("unk_token")
        self.unknown = inner.token_to_id(unknown) if unknown else parts["model"].get("unk_id")
        self.name = name
        self.eod = eod
        self.hash = fingerprint
        self.by_words = _works_by_words(parts)
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._inner = inner

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; the library uses all cores (RAYON_NUM_THREADS limits it).

        UserError if the files refer to a token that they lack, or have no token for a character.
        """
        with naming_faults(
            f"vocab_file: {self.name} {self.hash} cannot encode a text without losing characters",
            "use a tokenizer with bytes (ByteLevel with its whole alphabet, or byte_fallback) or"
            " an unknown token, or remove such characters from the text",
        ):
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes of the text of each id, [vocab_size] int64; special tokens have none.

        None if tokens don't determine it: if a token can mean several texts, like an unknown word,
        or if the tokenizer changes the text first. SentencePiece adds a space before each document,
        which is counted. NFC composes letters; then the bytes are those of the composed text.
        """
        parts = json.loads(self.to_json())
        model, added = parts["model"], parts["added_tokens"]
        normalizers = _steps(parts["normalizer"], "normalizers")
        splits = _steps(parts["pre_tokenizer"], "pretokenizers")
        vocab = self._inner.get_vocab(with_added_tokens=True)
        byte_level = [step for step in splits if step["type"] == "ByteLevel"]
        if byte_level:
            changes_text = any(step.get("add_prefix_space") for step in byte_level)
            changes_text |= any(step["type"] != "NFC" for step in normalizers)
            bytes_of = len  # one character for each byte
        else:
            pieces = self._inner.get_vocab(with_added_tokens=False).keys()
            has_bytes = model.get("byte_fallback") and pieces >= {*BYTES_OF_FALLBACK}
            changes_text = not has_bytes or any(step not in MARKS_SPACES for step in normalizers)
            changes_text |= any(step.get("replacement", METASPACE) != METASPACE for step in splits)
            bytes_of = bytes_of_piece
        loses_text = any(
            step["type"] not in SPLITS or step.get("behavior") == "Removed" for step in splits
        )
        strips = any((new["lstrip"] or new["rstrip"]) and not new["special"] for new in added)
        if changes_text or loses_text or strips or model["type"] not in ("BPE", "Unigram"):
            return None
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in vocab.items():
            counts[number] = bytes_of(token)
        for token in added:  # these are written unchanged
            counts[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        counts[self.eod] = 0
        return counts

    @property
    def end_of_document(self) -> str:
        """The token that `eod` is the id of."""
        token = self._inner.id_to_token(self.eod)
        assert token is not None  # because eod was looked up by this token
        return token

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        content = json.loads(self._inner.to_str())
        if content["model"].get("unk_token") == NO_TOKEN:
            content["model"]["unk_token"] = None
        return json.dumps(content, ensure_ascii=False)


def _works_by_words(parts: dict) -> bool:
    """Whether words, cut by GPT-2's pattern, get the same ids as the whole text.

    This holds for byte-level BPE with that pattern. NFC changes nothing, and special tokens are not
    searched in documents; other added tokens may cross word boundaries.
    """
    before = parts["pre_tokenizer"] or {}
    normalizer = parts["normalizer"] or {"type": "NFC"}
    after = parts["post_processor"] or {"type": "ByteLevel"}
    return (
        (parts["model"]["type"], before.get("type")) == ("BPE", "ByteLevel")
        and before.get("use_regex", True)
        and not before.get("add_prefix_space")
        and (normalizer["type"], after["type"]) == ("NFC", "ByteLevel")
        and all(token["special"] for token in parts["added_tokens"])
    )


def _steps(part: dict | None, key: str) -> list[dict]:
    """The steps of a component of a tokenizer.json; a Sequence has several."""
    if part is None or part["type"] != "Sequence":
        return [part] if part else []
    return [step for inner in part[key] for step in _steps(inner, key)]


def bytes_of_piece(piece: str) -> int:
    """Bytes of a SentencePiece piece: ▁ is a space, <0xAB> is one byte."""
    if piece in BYTES_OF_FALLBACK:
        return 1
    return len(piece.replace(METASPACE, " ").encode())


def gpt2(vocab_path: Path, merge_path: Path) -> Subwords:
    """The tokenizer from both files; UserError if they are damaged, swapped or of another kind."""
    from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

    vocab_text = read_text(vocab_path, "vocab_file")
    merges_text = read_text(merge_path, "merge_file")
    with naming_faults(
        f"vocab_file: {vocab_path} and {merge_path} are not GPT-2's vocab.json and merges.txt",
        "give two files that belong together; for a tokenizer.json use tokenizer_type: HFTokenizer",
    ):
        vocab = json.loads(vocab_text)
        end = end_of_document(vocab_path, vocab)
        missing = {*pre_tokenizers.ByteLevel.alphabet(), end} - vocab.keys()
        if missing:
            raise ValueError(f"{len(missing)} of the 256 bytes and {end} are missing")
        bpe = ByteLevelBPETokenizer.from_file(str(vocab_path), str(merge_path))
    fingerprint = hash_of(vocab_text, merges_text, *unusual(end))
    return Subwords("GPT2BPETokenizer", bpe._tokenizer, vocab[end], fingerprint)


def hugging_face(path: Path) -> Subwords:
    """The tokenizer from a tokenizer.json, or from a folder that has one.

    UserError for anything else, and for damaged files.
    """
    import tokenizers

    if path.is_dir():
        path = path / WHOLE
    text = read_text(path, "vocab_file")
    reading = (
        f"vocab_file: {path} is not a tokenizer.json that the library can read",
        "a vocab.json needs tokenizer_type: GPT2BPETokenizer and its merge_file; transformers can"
        " write a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
    )
    with naming_faults(*reading):
        content = json.loads(text)
        inner = tokenizers.Tokenizer.from_str(text)
    vocab = inner.get_vocab(with_added_tokens=True)
    added_tokens = content.get("added_tokens", [])
    end = end_of_document(path, vocab, {token["content"] for token in added_tokens})
    eod = vocab.get(end)
    if eod is None:
        raise UserError(
            f"vocab_file: {path} has no {END_OF_DOCUMENT} to end documents with, and there is no"
            f" {BESIDE} with an eos_token next to it - add {END_OF_DOCUMENT} to its special tokens,"
            " or copy that file too"
        )
    for token in added_tokens:
        if token["id"] == eod and not token["special"]:
            # These are found in documents too, so a document could contain its own end.
            token["special"] = True
            with naming_faults(*reading):
                inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    built = Subwords("HFTokenizer", inner, eod, hash_of(text, *unusual(end)))
    if eod in built.encode(f"one {end} two{end}three"):
        raise UserError(
            f"vocab_file: {path} encodes the text '{end}' in a document as the end of the document"
            " - move it from the model's vocabulary to added_tokens, or use its SentencePiece"
            " model (tokenizer_type: SPMTokenizer)"
        )
    if isinstance(inner.model, tokenizers.models.BPE) and inner.model.unk_token is None:
        inner.model.unk_token = NO_TOKEN
    return built


def end_of_document(file: Path, vocab: Mapping[str, int], added: Collection[str] = ()) -> str:
    """<|endoftext|>, or if that is not `added`, the eos_token next to a tokenizer's file.

    In OPT's vocabulary <|endoftext|> is an ordinary token, and documents end with </s>.
    """
    beside = file.with_name(BESIDE)
    settings: Any = {}
    if beside.is_file():
        with naming_faults(f"vocab_file: {beside} cannot be read", "copy it again"):
            settings = dict(json.loads(read_text(beside, "vocab_file")))
    token = settings.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or END_OF_DOCUMENT in added or token not in vocab:
        return END_OF_DOCUMENT
    return token


def unusual(end: str) -> list[str]:
    """What a fingerprint has in addition to the files: an end of documents other than
    <|endoftext|>."""
    return [] if end == END_OF_DOCUMENT else [end]
