"""Training of a byte-level BPE."""

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from megatron.data.tokenizers.tokenizer import END_OF_DOCUMENT
from megatron.errors import UserError


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE with <|endoftext|> as id 0: the text of a tokenizer.json.

    The same texts give the same tokenizer. Raises UserError for a vocabulary that cannot hold the
    bytes.
    """
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size: {vocab_size} cannot hold the 256 bytes and {END_OF_DOCUMENT} "
            f"- use at least {smallest}"
        )
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, show_progress=False, special_tokens=[END_OF_DOCUMENT]
    )
    return bpe.to_str(pretty=True)
