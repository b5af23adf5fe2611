"""Training of a byte-level BPE, and of SentencePiece models."""

import io
from collections.abc import Iterable, Iterator
from typing import Literal

from sentencepiece import SentencePieceTrainer
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from megatron.data.tokenizers.tokenizer import END_OF_DOCUMENT
from megatron.errors import UserError

MOST_ENTRIES = 4_000_000  # memory is taken for all of them before the training
LONGEST = 10_000  # characters of a line that SentencePiece learns from at once
THREADS = 4  # of SentencePiece: sums depend on their number, so it is the same everywhere


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE with <|endoftext|> as id 0: the text of a tokenizer.json.

    The same texts give the same tokenizer.
    """
    _check_size(vocab_size)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, show_progress=False, special_tokens=[END_OF_DOCUMENT]
    )
    return bpe.to_str(pretty=True)


def _check_size(vocab_size: int) -> None:
    """Raise UserError for a vocabulary that cannot hold the bytes, or would fill the memory."""
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size: {vocab_size} cannot hold the 256 bytes and {END_OF_DOCUMENT} "
            f"- use at least {smallest}"
        )
    if vocab_size > MOST_ENTRIES:
        raise UserError(
            f"vocab_size: {vocab_size} is more than any known vocabulary has - use at most"
            f" {MOST_ENTRIES}"
        )


def train_sentence_pieces(
    texts: Iterable[str], vocab_size: int, model: Literal["bpe", "unigram"]
) -> bytes:
    """Train a SentencePiece model that changes no text: the contents of a `.model` file.

    Characters that it does not know are written as bytes, as in Llama's, and <|endoftext|> is a
    symbol that no text can contain. The same texts give the same model. UserError if they do
    not suffice for so many entries, or so few cannot hold the bytes.
    """
    _check_size(vocab_size)
    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=written,
            model_type=model,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            control_symbols=[END_OF_DOCUMENT],
            max_sentence_length=8 * LONGEST,  # bytes; longer ones would be left out
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as fault:
        reason = str(fault).strip().rpartition("]")[2].strip() or str(fault)
        raise UserError(
            f"vocab_size: {vocab_size} entries cannot be learned from this text ({reason[:200]})"
            " - use another --vocab-size, or more text"
        ) from None
    return written.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines of the texts, cut where they are very long; line breaks become bytes in any case."""
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), LONGEST):
                yield line[start : start + LONGEST]
