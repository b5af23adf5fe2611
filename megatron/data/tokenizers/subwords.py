"""Tokenizers of the Hugging Face `tokenizers` library."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron.data.tokenizers.pieces import BREAK
from megatron.data.tokenizers.token_bytes import bytes_of_tokens
from megatron.errors import UserError

INTERRUPTS = (KeyboardInterrupt, SystemExit)


@contextmanager
def naming_faults(fault: str, fix: str) -> Iterator[None]:
    """Raise UserError "fault: reason - fix" where the library fails.

    It raises bare Exceptions, and panics of Rust, which are not even that.
    """
    try:
        yield
    except INTERRUPTS:
        raise
    except BaseException as error:
        raise UserError(f"{fault}: {str(error)[:200]} - {fix}") from None


def cuts_are_safe(inner: tokenizers.Tokenizer) -> bool:
    """Whether this tokenizer gives a text cut as in pieces.py the ids of the whole text.

    So it is for byte-level BPE with GPT-2's pattern: there no token joins what is no space to a
    space after it. NFC does not either. Added tokens must not, nor look at their neighbours.
    """
    parts = json.loads(inner.to_str())
    before = parts["pre_tokenizer"] or {}
    is_gpt2 = before.get("type") == "ByteLevel" and before.get("use_regex", True)
    normalizer = (parts["normalizer"] or {"type": None})["type"]
    if not is_gpt2 or before.get("add_prefix_space") or normalizer not in (None, "NFC"):
        return False
    if parts["model"]["type"] != "BPE" or parts["model"].get("dropout"):
        return False
    # Special tokens are not looked for in documents.
    added = [token for token in parts["added_tokens"] if not token["special"]]
    return not any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or BREAK.search(token["content"])
        for token in added
    )


class Subwords:
    """A tokenizer of the Hugging Face `tokenizers` library."""

    def __init__(self, name: str, inner: tokenizers.Tokenizer, eod: int, fingerprint: str):
        # A tokenizer.json may ask for these. Documents are never cut or padded here.
        inner.no_truncation()
        inner.no_padding()
        self.name = name
        self.eod = eod
        self.hash = fingerprint
        self.cuttable = cuts_are_safe(inner)
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._take(inner)

    def _take(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True  # a document never contains its own end
        self._inner = inner

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self._inner)  # the library's own pickle forgets that setting

    def encode(self, text: str) -> list[int]:
        """Ids of a text; UserError where the files promise a token that they lack."""
        fault = f"vocab_file: the tokenizer cannot encode {text[:40]!r}"
        with naming_faults(fault, "copy its files again"):
            return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; the library works on all cores (RAYON_NUM_THREADS limits it)."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> NDArray[np.int64] | None:
        return bytes_of_tokens(self._inner, self.eod)

    @property
    def end_of_document(self) -> str:
        """The token that `eod` is the id of."""
        token = self._inner.id_to_token(self.eod)
        assert token is not None  # its id was found by the token
        return token

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        return self._inner.to_str()
