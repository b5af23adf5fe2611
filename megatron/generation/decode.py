"""Continue several texts together, token by token, with a cache or without.

No token stands for padding, and nothing is masked. All texts of a batch begin at position 0. The
tokens that the shortest one has are read together, in one pass. Then each step reads one more token
of every text: the next one of its prompt, or the one that was chosen for it. So every text is read
as if it were alone, whatever its encoding is. A text that has ended leaves the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.model import GPT, Cache

MOST = 2**24  # tokens: beyond, positions are not exact in float32
PIECE = 1024  # tokens of the prompts that are read in one pass
INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no whole character
CONTEXT = 8  # tokens of the prompt that are decoded too, because a token's text may depend on them
MOST_WAITING = 8  # tokens: no character has more


class Number(NamedTuple):
    """A setting that is a number: its bounds, and its meaning for --help."""

    least: float
    most: float
    meaning: str


NUMBERS = {
    "repetition_penalty": Number(
        1e-6, 1e6, "divides the logits of tokens in the text; 1: no penalty"
    ),
    "temperature": Number(0.0, 1e6, "divides all logits; 0: always the likeliest token"),
    "top_k": Number(1, MOST, "draw among this many of the likeliest tokens"),
    "top_p": Number(
        1e-6, 1.0, "draw among the likeliest tokens that together have this probability"
    ),
    "max_new_tokens": Number(1, MOST, "tokens of a continuation at most"),
    "seed": Number(0, MOST, "seed of the random draws"),
    "samples": Number(1, MOST, "continuations of each prompt"),
    "batch_size": Number(1, MOST, "texts continued together at most"),
}


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation; NUMBERS says more. The first four act on logits in this order.

    That is transformers' order, and they mean the same: repetition_penalty (CTRL, arXiv
    1909.05858), temperature, top_k and top_p (arXiv 1904.09751); None: all tokens
    stops: strings before which a continuation ends; past_documents: whether it goes on behind the
    end of a document; cached: whether earlier keys and values are kept, or all is computed again
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    max_new_tokens: int = 64
    seed: int = 0
    samples: int = 1
    batch_size: int = 16
    stops: tuple[str, ...] = ()
    past_documents: bool = False
    cached: bool = True

    def check(self) -> None:
        """Raises UserError with all that is wrong."""
        faults = []
        for name, (least, most, _) in NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                option = name.replace("_", "-")
                faults.append(f"--{option} {value}: give a number of {least:.8g} to {most:.8g}")
        if "" in self.stops:
            faults.append("--stop: an empty string would end every text at once; leave it out")
        if faults:
            raise UserError("\n".join(faults))


class Written:
    """The text of tokens that follow a prompt, as soon as it is certain.

    A token may end inside a character, and a stop string may have begun: such text waits until a
    later token decides. Only the last tokens are decoded again.
    text: all that is certain; stopped: whether a stop string has come; the text ends before it
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text, self.stopped = "", False
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(prompt[-CONTEXT:])
        self._first, self._whole = 0, len(self._ids)  # decoded again, and with whole characters
        self._taken = 0  # characters that were taken
        self._waiting = ""  # whole characters with which a stop string may begin

    def take(self) -> str:
        """The text that has become certain since the last call."""
        new = self.text[self._taken :]
        self._taken = len(self.text)
        return new

    def add(self, token: int) -> None:
        """Append a token."""
        self._ids.append(token)
        self._decode(at_end=False)

    def finish(self) -> None:
        """No token follows: what waited is certain."""
        if not self.stopped:
            self._decode(at_end=True)
        if not self.stopped:
            self.text += self._waiting

    def _decode(self, *, at_end: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._first : self._whole])
        if not self.text + self._waiting:  # the prompt may end inside a character
            before = before.rstrip(INCOMPLETE)
        text = self._tokenizer.decode(self._ids[self._first :])
        undecided = len(self._ids) - self._whole
        if text.endswith(INCOMPLETE) and undecided < MOST_WAITING and not at_end:
            return
        self._first, self._whole = self._whole, len(self._ids)

        # What is before the text that waited cannot belong to a stop string.
        text = self._waiting + text[len(before) :]
        places = [text.find(stop) for stop in self._stops if stop in text]
        self.stopped = bool(places)
        longest = max(map(len, self._stops), default=1)
        certain = min(places, default=max(len(text) - longest + 1, 0))
        self.text += text[:certain]
        self._waiting = text[certain:]


class Continuation:
    """A prompt's tokens and what was chosen behind them.

    number: of the prompt; sample: which of its texts; what is drawn has a seed for both
    ended: why no more is chosen (end_of_document, stop, max_new_tokens), None while it goes on
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        settings: GenerationSettings,
        number: int = 0,
        sample: int = 0,
    ) -> None:
        # A model has learned what begins a text only behind the end of another one.
        self.prompt = list(prompt) or [tokenizer.eod]
        self.tokens = [*self.prompt]
        self.settings, self.number, self.sample = settings, number, sample
        self.written = Written(tokenizer, self.prompt, settings.stops)
        self.ended: str | None = None
        self._end = None if settings.past_documents else tokenizer.eod
        self._random = np.random.default_rng([settings.seed, number, sample])

    @property
    def new(self) -> int:
        """The number of tokens that were chosen."""
        return len(self.tokens) - len(self.prompt)

    def draw(self) -> float:
        """A number from 0 to below 1, the next one of its seed."""
        return self._random.random()

    def add(self, token: int) -> None:
        """Append a chosen token, and end where it is the last one."""
        self.tokens.append(token)
        if token == self._end:
            self.ended = "end_of_document"
        else:
            self.written.add(token)
            if self.written.stopped:
                self.ended = "stop"
            elif self.new == self.settings.max_new_tokens:
                self.ended = "max_new_tokens"
        if self.ended:
            self.written.finish()


def continuation(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """What a model writes behind a prompt; NUMBERS says what the settings mean.

    Raises UserError for settings outside their bounds, for a tokenizer of more tokens than the
    model has and for a text that is too long for it.
    """
    if tokenizer.vocab_size > model.vocab:
        raise UserError(
            f"tokenizer: has {tokenizer.vocab_size} tokens and the model {model.vocab} - give the"
            " tokenizer that the model learned with"
        )
    settings = GenerationSettings(1.0, temperature, top_k, top_p, max_new_tokens, seed)
    settings.check()
    text = ""
    training = model.training
    model.eval()
    try:
        for (step,) in continued(model, tokenizer, [prompt], settings):
            text = step.written.text
    finally:
        model.train(training)
    return text


def continued(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[str], settings: GenerationSettings
) -> Iterator[list[Continuation]]:
    """Continue each prompt, as often as `samples`; after each step, the texts that got a token.

    Raises UserError, before anything is computed, if the model cannot read texts of that length.
    """
    texts = []
    begin = [] if model.begin_of_text is None else [model.begin_of_text]
    for number, prompt in enumerate(prompts):
        ids = [*begin, *tokenizer.encode(prompt)]
        for sample in range(settings.samples):
            texts.append(Continuation(tokenizer, ids, settings, number, sample))
    new = settings.max_new_tokens
    # The last token is chosen and not read.
    longest = max((len(text.prompt) for text in texts), default=1) + new - 1
    if longest > MOST:
        raise UserError(f"--max-new-tokens: texts of {longest} tokens are longer than {MOST}")
    try:
        model.check_length(longest)
    except UserError as fault:
        raise UserError(
            f"--max-new-tokens {new}: with the prompt {longest} tokens are read, and {fault}"
        ) from None
    return decode(model, tokenizer.vocab_size, texts, settings.batch_size)


@torch.inference_mode()
def decode(
    model: GPT, vocab: int, texts: Sequence[Continuation], most: int = 16
) -> Iterator[list[Continuation]]:
    """Continue texts with equal settings; after each step, those that have got a token.

    vocab: tokens that the tokenizer knows, because an embedding may have more rows
    most: texts that are continued together

    They have similar lengths. While the longest prompt of a batch is read token by token, shorter
    ones are being continued already. With a difference of more than `max_new_tokens` these would
    have ended before, and steps would be lost.
    """
    waiting = sorted(texts, key=lambda text: len(text.prompt))
    device = model.word_embeddings.weight.device
    while waiting:
        settings = waiting[0].settings
        longest = len(waiting[0].prompt) + settings.max_new_tokens
        going: list[Continuation] = []
        while waiting and len(going) < most and len(waiting[0].prompt) <= longest:
            going.append(waiting.pop(0))
        cache = Cache() if settings.cached else None
        first, read = 0, len(going[0].tokens)
        while going:
            ids = torch.tensor([text.tokens[first:read] for text in going], device=device)
            features = ids
            for piece in ids.split(PIECE if cache is not None else read, dim=1):
                features = model.features(piece, cache)[:, -1]

            rows = [row for row, text in enumerate(going) if len(text.tokens) == read]
            choosing = [going[row] for row in rows]
            if choosing:
                logits = model.logits(features[rows])[:, :vocab]
                for text, token in zip(choosing, chosen(logits, choosing, settings), strict=True):
                    text.add(token)
                yield choosing

            staying = [row for row, text in enumerate(going) if text.ended is None]
            if len(staying) < len(going):
                going = [going[row] for row in staying]
                if cache is not None:
                    cache.select(torch.tensor(staying, dtype=torch.long, device=device))
            first = 0 if cache is None else read
            read += 1


def chosen(
    logits: Tensor, texts: Sequence[Continuation], settings: GenerationSettings
) -> list[int]:
    """The next token of each text: logits [texts, vocab] -> ids."""
    if not logits.isfinite().all():
        raise UserError(
            "logits: the model computed numbers that are not finite - compute in float32"
            " (--dtype fp32), or take an earlier checkpoint (--step)"
        )
    scores = logits.double()
    if settings.repetition_penalty != 1:
        from transformers import RepetitionPenaltyLogitsProcessor  # importing it takes seconds

        repetition: Any = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)
        rows = []
        for row, text in zip(scores, texts, strict=True):
            tokens = torch.tensor([text.tokens], device=scores.device)
            rows.append(repetition(tokens, row[None]))
        scores = torch.cat(rows)
    draws = [text.draw() for text in texts]
    if settings.temperature == 0:
        return scores.argmax(dim=-1).tolist()

    # From the highest one on: a tiny temperature makes no infinity of float64.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / settings.temperature
    cuts: list[Any] = []
    if settings.top_k is not None:
        from transformers import TopKLogitsWarper

        cuts.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None:
        from transformers import TopPLogitsWarper

        cuts.append(TopPLogitsWarper(settings.top_p))
    for cut in cuts:
        scores = cut(None, scores)

    # The token at which the cumulative probability passes the draw.
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    places = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None] * total
    # Rounded up to the total, a place would be behind the last token.
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, places.minimum(below), right=True)[:, 0].tolist()
