"""Continue several texts together, token by token, with a cache or without.

No token stands for padding, and nothing is masked. All texts of a batch begin at position 0. The
tokens that the shortest one has are read together, in one pass. Then each step reads one more token
of every text: the next one of its prompt, or the one that was chosen for it. So every text is read
as if it were alone, whatever its encoding is. A text that has ended leaves the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError
from megatron.generation.sampling import Sampling
from megatron.generation.written import Written
from megatron.model import GPT, Cache

PIECE = 1024  # tokens of the prompts that are read in one pass


class Ending(Enum):
    """Why a text ended."""

    DOCUMENT = "end_of_document"
    STOP = "stop"
    MOST = "max_new_tokens"


@dataclass
class Text:
    """A prompt and its continuation.

    prompt: its tokens, one or more; seed: of what is drawn for it
    written: the continuation as text, if it is asked for
    tokens: the prompt and what was chosen; ended: why no more is chosen, None while it goes on
    """

    prompt: Sequence[int]
    seed: Sequence[int] = (0,)
    written: Written | None = None
    tokens: list[int] = field(default_factory=list)
    ended: Ending | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self._random = np.random.default_rng(list(self.seed))

    @property
    def new(self) -> int:
        """How many tokens were chosen."""
        return len(self.tokens) - len(self.prompt)

    def add(self, token: int, how: "Decoding") -> None:
        """Append a chosen token, and end where it is the last one."""
        self.tokens.append(token)
        if token == how.end:
            self.ended = Ending.DOCUMENT
        else:
            if self.written is not None:
                self.written.add(token)
            if self.written is not None and self.written.stopped:
                self.ended = Ending.STOP
            elif self.new == how.most:
                self.ended = Ending.MOST
        if self.ended is not None and self.written is not None:
            self.written.finish()

    def draw(self) -> float:
        """A number from 0 to below 1, the next one of its seed."""
        return self._random.random()


AnyText = TypeVar("AnyText", bound=Text)


@dataclass(frozen=True)
class Decoding:
    """How texts are continued.

    most: tokens that are chosen at most for each; end: the token that ends a document, which then
    is the text's last; None: texts go on behind it; vocab: tokens that the tokenizer knows, because
    an embedding may have more rows; cached: whether earlier keys and values are kept, or all is
    computed again for each token
    """

    sampling: Sampling
    most: int
    vocab: int
    end: int | None = None
    cached: bool = True


@torch.inference_mode()
def decode(model: GPT, texts: Sequence[AnyText], how: Decoding) -> Iterator[list[AnyText]]:
    """Continue the texts; after each step, those that have got a token."""
    going = list(texts)
    device = model.word_embeddings.weight.device
    reader = _Reader(model, device, cached=how.cached)
    read = min((len(text.prompt) for text in going), default=0)
    if going:
        reader.read([text.tokens[:read] for text in going])
    while going:
        choosing = [row for row, text in enumerate(going) if len(text.tokens) == read]
        _choose(reader.logits(choosing), [going[row] for row in choosing], how)
        yield [going[row] for row in choosing]
        staying = [row for row, text in enumerate(going) if text.ended is None]
        if len(staying) < len(going):
            going = [going[row] for row in staying]
            reader.select(staying)
        if going:
            reader.read([text.tokens[read : read + 1] for text in going])
            read += 1


def _choose(logits: Tensor, texts: Sequence[Text], how: Decoding) -> None:
    """Give each text its next token: logits [texts, vocab]."""
    if not texts:
        return
    if not logits.isfinite().all():
        raise UserError(
            "logits: the model computed numbers that are not finite - compute in float32"
            " (--dtype fp32), or take an earlier checkpoint (--step)"
        )
    tokens = [text.tokens for text in texts]
    draws = [text.draw() for text in texts]
    chosen = how.sampling.chosen(logits[:, : how.vocab], tokens, draws)
    for text, token in zip(texts, chosen, strict=True):
        text.add(token, how)


class _Reader:
    """What a model makes of the texts so far."""

    def __init__(self, model: GPT, device: torch.device, *, cached: bool) -> None:
        self._model, self._device = model, device
        self._cache = Cache(rolling=True) if cached else None
        self._ids = torch.zeros(0, 0, dtype=torch.long, device=device)  # where nothing is kept
        self._last: Tensor = torch.zeros(0)  # features of each text's last token: [texts, hidden]

    def read(self, tokens: Sequence[Sequence[int]]) -> None:
        """Read as many further tokens of each text."""
        ids = torch.tensor(tokens, device=self._device)
        if self._cache is None:
            earlier = self._ids if self._ids.numel() else ids[:, :0]
            self._ids = torch.cat([earlier, ids], dim=1)
            self._last = self._model.features(self._ids)[:, -1]
            return
        for piece in ids.split(PIECE, dim=1):
            self._last = self._model.features(piece, self._cache)[:, -1]

    def logits(self, rows: Sequence[int]) -> Tensor:
        """What may follow the last token of these texts: [texts, vocab]."""
        return F.linear(self._last[list(rows)], self._model.output_matrix)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these texts alone."""
        texts = torch.tensor(rows, dtype=torch.long, device=self._device)
        if self._cache is not None:
            self._cache.select(texts)
        else:
            self._ids = self._ids[texts]
