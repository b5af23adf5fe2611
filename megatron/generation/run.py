"""Prompts to continuations: batches, seeds, and how long it took."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.generation.decoding import AnyText, Decoding, Text, decode
from megatron.generation.sampling import Sampling
from megatron.generation.written import Written
from megatron.model import GPT
from megatron.model.methods import MOST


@dataclass(frozen=True)
class Settings:
    """What is asked for beside the prompts.

    most: new tokens of a continuation at most; seed: of all that is drawn; samples: continuations
    of each prompt; stops: strings before which a continuation ends; past_documents: whether it
    goes on behind the end of a document; batch: texts that are continued together at most;
    cached: whether earlier keys and values are kept
    """

    sampling: Sampling = field(default_factory=Sampling)
    most: int = 64
    seed: int = 0
    samples: int = 1
    stops: Sequence[str] = ()
    past_documents: bool = False
    batch: int = 16
    cached: bool = True

    def check(self) -> None:
        """UserError with all that is wrong."""
        faults = []
        try:
            self.sampling.check()
        except UserError as fault:
            faults.append(str(fault))
        least_and_most = {
            "--max-new-tokens": (self.most, 1),
            "--seed": (self.seed, 0),
            "--samples": (self.samples, 1),
            "--batch-size": (self.batch, 1),
        }
        for option, (value, least) in least_and_most.items():
            if not least <= value <= MOST:
                faults.append(f"{option} {value}: give a whole number of {least} to {MOST}")
        if "" in self.stops:
            faults.append("--stop: an empty string would end every text at once; leave it out")
        if faults:
            raise UserError("\n".join(faults))


@dataclass
class Continuation(Text):
    """A text of one prompt. number: of the prompt, from 0; sample: which of its texts."""

    number: int = 0
    sample: int = 0


@dataclass
class Speed:
    """tokens: chosen so far; seconds: since the first prompt was read."""

    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        return f"{self.tokens} tokens in {self.seconds:.2f} s: {rate:.1f} tokens/s"


def continued(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[str], how: Settings, speed: Speed
) -> Iterator[list[Continuation]]:
    """Continue each prompt; after each step, the texts that have got a token.

    The text of a prompt does not depend on the other prompts: what is drawn for it has a seed of
    its own, from the seed and the numbers of the prompt and of the sample.
    UserError, before anything is computed, where the model cannot read texts of that length.
    """
    how.check()
    texts = [
        one
        for number, prompt in enumerate(prompts)
        for one in _texts(model, tokenizer, number, prompt, how)
    ]
    check_length(model, texts, how.most)
    decoding = Decoding(
        how.sampling,
        most=how.most,
        vocab=tokenizer.vocab_size,
        end=None if how.past_documents else tokenizer.eod,
        cached=how.cached,
    )
    for batch in batches(texts, how.batch, how.most):
        steps = decode(model, batch, decoding)
        while True:
            begin = time.perf_counter()
            got = next(steps, None)
            speed.seconds += time.perf_counter() - begin
            if got is None:
                break
            speed.tokens += len(got)
            yield got


def _texts(
    model: GPT, tokenizer: Tokenizer, number: int, prompt: str, how: Settings
) -> Iterator[Continuation]:
    # A model has learned what begins a text only behind the end of another one.
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    for sample in range(how.samples):
        yield Continuation(
            ids,
            seed=(how.seed, number, sample),
            written=Written(tokenizer, ids, how.stops),
            number=number,
            sample=sample,
        )


def batches(texts: Sequence[AnyText], most: int, new: int) -> Iterator[list[AnyText]]:
    """Texts that are continued together: at most so many, and of similar lengths.

    While the longest prompt of a batch is read token by token, shorter ones are being continued
    already. With a difference of more than `new` tokens these would have ended before, and steps
    would be lost.
    """
    batch: list[AnyText] = []
    for text in sorted(texts, key=lambda one: len(one.prompt)):
        too_long = batch and len(text.prompt) - len(batch[0].prompt) > new
        if too_long or len(batch) == most:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def check_length(model: GPT, texts: Sequence[Text], new: int) -> None:
    """UserError where the longest text may become longer than the model can read."""
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
