"""SPMTokenizer: a SentencePiece model, as GPT-NeoX reads it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import (  # its names are made when it is imported
    ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
)

from megatron.data.tokenizers.hugging_face import bytes_of_piece
from megatron.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    encoding_threads,
    hash_of,
    read_bytes,
)
from megatron.errors import UserError


class SentencePieces:
    """A SentencePiece model. Ids are the library's own, without begin and end of a sentence.

    Most models normalise the text (NFKC, spaces), so `decode` gives back the normalised one. Its
    pieces reach over spaces, so no cut of a long text is known to be safe.
    """

    name = "SPMTokenizer"
    cuttable = False

    def __init__(self, model: ModelProto, eod: int, fingerprint: str):
        self.eod = eod
        self.hash = fingerprint
        self._model = model.SerializeToString()
        self._inner = SentencePieceProcessor(model_proto=self._model)
        self.vocab_size = self._inner.get_piece_size()
        self.unknown = self._inner.unk_id()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode(list(texts), num_threads=encoding_threads())

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([int(number) for number in ids if number < self.vocab_size])

    def token_bytes(self) -> NDArray[np.int64] | None:
        """Bytes of each piece, or None if the model changes texts or lacks bytes for others."""
        model = ModelProto.FromString(self._model)
        normalizer = model.normalizer_spec
        changes_text = normalizer.name != "identity" or normalizer.remove_extra_whitespaces
        if changes_text or not model.trainer_spec.byte_fallback:
            return None
        kinds = ModelProto.SentencePiece
        without_text = (kinds.CONTROL, kinds.UNKNOWN, kinds.UNUSED)
        counts = [
            0 if piece.type in without_text else bytes_of_piece(piece.piece)
            for piece in model.pieces
        ]
        return np.array(counts, dtype=np.int64)


def sentence_pieces(path: Path) -> SentencePieces:
    """The tokenizer of a `.model` file.

    <|endoftext|> ends a document where the model has it, else its end of a sentence, usually </s>.
    UserError for a model without either and for files that are no model.
    """
    content = read_bytes(path, "vocab_file")
    try:
        model = ModelProto.FromString(content)
        processor = SentencePieceProcessor(model_proto=content)
    except Exception as fault:  # protobuf has a class of its own, the library RuntimeError
        reason = str(fault).partition("\n")[0][:200]
        raise UserError(
            f"vocab_file: SPMTokenizer reads a SentencePiece model, {path} is none or damaged"
            f" ({reason}) - copy it again, or give another file"
        ) from None
    eod = processor.eos_id()
    for number, piece in enumerate(model.pieces):
        if piece.piece == END_OF_DOCUMENT:
            eod = number
    if eod < 0:
        raise UserError(
            f"vocab_file: {path} has neither {END_OF_DOCUMENT} nor an end of a sentence, and"
            f" documents must end - train it with control_symbols={END_OF_DOCUMENT}"
        )
    # A piece of any other type is looked for in documents, so each could contain its own end.
    model.pieces[eod].type = ModelProto.SentencePiece.CONTROL
    built = SentencePieces(model, eod, hash_of(content))
    if not built.encode("Hello world"):
        raise UserError(
            f"vocab_file: {path} turns 'Hello world' into nothing, its vocabulary is empty "
            "- copy it again"
        )
    return built
