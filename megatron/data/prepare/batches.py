"""A corpus in batches of pieces that can be encoded one by one."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from megatron.data.corpora.corpus import Corpus
from megatron.data.tokenizers.tokenizer import pieces

BATCH_CHARACTERS = 500_000  # encoded at once: the library holds some 150 bytes per token


class Piece(NamedTuple):
    """A part of a document.

    document: its number in the corpus, from 1 on; last: whether the document ends here
    only_space, text_bytes: of the document, UTF-8; said with its last piece
    """

    text: str
    document: int
    last: bool
    only_space: bool = False
    text_bytes: int = 0


def pieces_of(
    corpus: Corpus, cuttable: bool, *, start: int = 0, stop: int | None = None
) -> Iterator[Piece]:
    """Documents number start + 1 to stop of a corpus, or to its end, in pieces.

    cuttable: of the tokenizer
    """
    numbered = enumerate(corpus.documents(), 1)
    for number, document in islice(numbered, start, stop):
        where = f"{corpus.name}: document {number}"
        texts = list(pieces(document, where=where, cuttable=cuttable))
        for text in texts[:-1]:
            yield Piece(text, number, last=False)
        size = len(document) if document.isascii() else len(document.encode())
        yield Piece(texts[-1], number, True, document.isspace(), size)


def batches_of(found: Iterable[Piece], characters: int = BATCH_CHARACTERS) -> Iterator[list[Piece]]:
    """Pieces in lists of so many characters or a little more."""
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text) + 1  # a million blank documents are a batch too
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
