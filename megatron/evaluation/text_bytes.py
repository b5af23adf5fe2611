"""How many bytes of text the scored targets are: perplexity becomes bits per byte."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.protocols import Windows
from megatron.results.row import EXACT, MEAN, Facts, Row, with_facts
from megatron.results.statistics import bits_per_byte

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ByteCounts:
    """What is known of the bytes of a text.

    of_tokens: bytes of each id [vocab]; None where the tokenizer is not at hand or does not say it
    mean: bytes per token of the whole corpus, by its card; None for an older card or none
    """

    of_tokens: NDArray[np.int64] | None = None
    mean: float | None = None

    def completed(self, row: Row, windows: Windows) -> Row:
        """The row with bits per byte, where they are known; an exact count stays.

        windows: what the row was measured on
        """
        if row.get("bytes_from") == EXACT:
            return row
        return with_facts(row, self.facts(windows, row["loss"]))

    def facts(self, windows: Windows, loss: float | None) -> Facts:
        """bytes, bytes_from and bits_per_byte; {} where nothing is known.

        loss: mean over the scored targets in nats. The end of a document is a target without
        bytes: what it costs to say that a document ends counts.
        """
        tokens = int(windows.counts.sum())
        if self.of_tokens is not None:
            size, way = self._counted(windows), EXACT
        elif self.mean:
            size, way = self.mean * tokens, MEAN
        else:
            return {}
        if not size:  # only ends of documents were scored
            return {}
        bits = None if loss is None else bits_per_byte(loss, tokens, size)
        return {"bytes": size, "bytes_from": way, "bits_per_byte": bits}

    def _counted(self, windows: Windows) -> int:
        assert self.of_tokens is not None
        total = 0
        for ids, first in zip(windows.ids, windows.first_scored, strict=True):
            targets = ids[1 + first :]
            known = targets[targets < len(self.of_tokens)]  # rows of the embedding may be padded
            total += int(self.of_tokens[known].sum())
        return total


TokenizerFiles = tuple[str, str | None, str | None]
"""tokenizer_type, vocab_file, merge_file."""


def existing(files: Iterable[TokenizerFiles]) -> Iterator[Tokenizer]:
    """The tokenizers of such files, where these exist and can be read.

    An evaluation needs no tokenizer, so their faults are no faults of it.
    """
    for kind, vocab_file, merge_file in files:
        try:
            yield build_tokenizer(kind, vocab_file, merge_file)
        except UserError:
            continue


def byte_counts(
    tokens: TokenFile, learned_with: Mapping[str, Any], tokenizers: Iterable[Tokenizer]
) -> ByteCounts:
    """What counts the bytes of a token file.

    learned_with: {hash, ...} of the checkpoint's tokenizer, where the file has no card
    tokenizers: candidates; the first that wrote the file counts
    """
    writer = tokens.meta.get("tokenizer") or learned_with
    mean = mean_bytes(tokens)
    for tokenizer in tokenizers:
        if tokenizer.hash == writer.get("hash"):
            return ByteCounts(tokenizer.token_bytes(), mean)
    if mean is None:
        logger.info("bits per byte: neither the tokenizer's files nor a card with text_bytes exist")
    return ByteCounts(mean=mean)


def mean_bytes(tokens: TokenFile) -> float | None:
    """Bytes of text per token, ends of documents among the tokens; None where no card says it."""
    return tokens.text_bytes / tokens.tokens if tokens.text_bytes else None
