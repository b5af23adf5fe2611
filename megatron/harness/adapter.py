"""Our model behind the interface of lm-evaluation-harness. Only `harness.tasks` imports this.

The harness's own HFLM needs accelerate, and computes texts of one pass with tokens of padding.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.generation.decode import Continuation, GenerationSettings, batches, decode
from megatron.model import GPT

TOGETHER = 512  # targets whose logits exist at once
USUAL_NEW_TOKENS = 256  # if a task names no number, as the harness has it
SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "repetition_penalty": float}
HANDLED = {"do_sample", "until", "max_gen_toks", *SAMPLING}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """The way in which texts are read.

    length: tokens that the model sees at most; a longer context loses its beginning
    stride: of rolling windows, tokens that they move by; batch_tokens: of a forward pass at most
    """

    length: int
    stride: int
    batch_tokens: int = 16384


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens of a text, of which the last `scored` ones are scored, each behind all before it."""

    tokens: Sequence[int]
    scored: int


class Harness(TemplateLM):
    """A GPT with its tokenizer, as the harness asks for it.

    A text has the numbers that it has alone.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, reading: Reading) -> None:
        super().__init__()
        self._model, self._ours, self._reading = model, tokenizer, reading

    @property
    def eot_token_id(self) -> int:
        return self._ours.eod

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows."""
        begin = self._model.begin_of_text
        return self._ours.eod if begin is None else begin

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at most."""
        return self._reading.length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text, behind the one with which the model's texts begin, if there is one."""
        tokens = list(self._ours.encode(string))
        begin = self._model.begin_of_text
        if begin is not None and add_special_tokens is not False:
            tokens.insert(0, begin)
        return tokens

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both are encoded together; a continuation of which nothing is left then, alone.

        The harness gives the latter no token, and so a probability of 1 (its pull request 4055).
        """
        before, scored = super()._encode_pair(context, continuation)
        if not scored:
            spaces = context[len(context.rstrip()) :]
            scored = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return before or [self.prefix_token_id], scored

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(text, context, continuation) of each -> log-likelihood in nats, and whether greedy."""
        asked = []
        self._warn_of_cuts([len(one) + len(more) - 1 for _, one, more in requests])
        for texts, context, continuation in requests:
            if not continuation:
                raise UserError(
                    f"--tasks: the continuation {texts[1]!r:.80} of {texts[0][-80:]!r} has no"
                    " tokens - correct the task's file"
                )
            if len(continuation) > self.max_length:
                raise UserError(
                    f"--lengths {self.max_length}: a task scores {len(continuation)} tokens at once"
                    " - give a longer length"
                )
            # The model reads all tokens but the last one.
            tokens = (context + continuation)[-self.max_length - 1 :]
            asked.append(ScoreRequest(tokens, len(continuation)))
        return self.scored(asked)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood in nats of each text, each token of which is scored once.

        Windows are those of the harness, behind the end of another text.
        """
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for read, predicted in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=self.max_length - self._reading.stride + 1,
            ):
                windows.append(ScoreRequest([*read, predicted[-1]], len(predicted)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_likelihood, _) in zip(owners, self.scored(windows), strict=True):
            totals[number] += log_likelihood
        return totals

    @torch.inference_mode()
    def scored(self, asked: Sequence[ScoreRequest]) -> list[tuple[float, bool]]:
        """Log-likelihoods in nats, and whether each scored token was the likeliest one.

        Batches hold texts of similar lengths, the longest first: they show what fits.
        """
        sizes = [len(request.tokens) for request in asked]
        longest_first = sorted(range(len(asked)), key=lambda number: -sizes[number])
        together: list[list[int]] = []
        room = 0  # for further texts in the last batch
        for number in longest_first:
            if room == 0:
                together.append([])
                room = max(1, self._reading.batch_tokens // sizes[number])
            together[-1].append(number)
            room -= 1

        scores: dict[int, tuple[float, bool]] = {}
        device = self._model.word_embeddings.weight.device
        for numbers in tqdm(together, "log-likelihood"):
            # What is behind the end of a shorter text changes nothing before it.
            tokens = [torch.tensor(asked[number].tokens) for number in numbers]
            padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
            ids = padded.to(device)
            features = self._model.features(ids[:, :-1])
            for row, number in enumerate(numbers):
                end = sizes[number] - 1
                first = end - asked[number].scored
                of_targets = features[row, first:end].split(TOGETHER)
                labels = ids[row, first + 1 : end + 1].split(TOGETHER)
                total, greedy = 0.0, True
                for x, wanted in zip(of_targets, labels, strict=True):
                    logits = F.linear(x, self._model.output_matrix).float()
                    losses = F.cross_entropy(logits, wanted, reduction="none")
                    total -= losses.double().sum().item()
                    greedy = greedy and torch.equal(logits.argmax(dim=-1), wanted)
                scores[number] = total, greedy
        return [scores[number] for number in range(len(asked))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, without the string that ends it.

        As in the harness, its tokens are decoded alone, and special ones have no text.
        """
        length = self.max_length
        sizes = []
        by_settings: dict[GenerationSettings, list[Continuation]] = {}
        for number, request in enumerate(requests):
            text, given = request.args
            settings = settings_by(given)
            new_tokens = settings.max_new_tokens
            room = length - new_tokens
            if room < 1:
                raise UserError(
                    f"--lengths {length}: a task asks for {new_tokens} new tokens, which leaves no"
                    " place for its text - give a longer length"
                )
            # As in the harness, a text that is too long loses its beginning.
            prompt = self.tok_encode(text)
            sizes.append(len(prompt) + new_tokens)
            asked = by_settings.setdefault(settings, [])
            asked.append(Continuation(self._ours, prompt[-room:], settings, number))
        self._warn_of_cuts(sizes)
        most = max(1, self._reading.batch_tokens // length)
        together: list[list[Continuation]] = []
        for settings, asked in by_settings.items():
            together += batches(asked, most, settings.max_new_tokens)
        sizes_of_tokens = self._ours.token_bytes()
        found: dict[int, str] = {}
        for batch in tqdm(together, "continuations"):
            settings = batch[0].settings
            for _ in decode(self._model, self._ours.vocab_size, batch, settings):
                pass
            for continuation in batch:
                new = continuation.tokens[len(continuation.prompt) :]
                if sizes_of_tokens is not None:
                    new = [token for token in new if sizes_of_tokens[token]]
                text = self._ours.decode(new)
                for stop in settings.stops:
                    text, _, _ = text.partition(stop)
                found[continuation.number] = text
        return [found[number] for number in range(len(requests))]

    def _warn_of_cuts(self, sizes: Sequence[int]) -> None:
        """Say how many texts lose their beginning; sizes: tokens of each with its continuation."""
        cut = sum(size > self.max_length for size in sizes)
        if cut:
            logger.warning(
                "%d of %d texts are longer than %d tokens, up to %d: they lost their beginning",
                cut,
                len(sizes),
                self.max_length,
                max(sizes),
            )


def settings_by(given: Mapping[str, Any]) -> GenerationSettings:
    """The settings that generation_kwargs of a task mean; UserError for others."""
    where = "--tasks: generation_kwargs of a task"
    try:
        known: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), USUAL_NEW_TOKENS))
        numbers = {
            name: kind(known[name])
            for name, kind in SAMPLING.items()
            if known.get(name) is not None
        }
    except (TypeError, ValueError, OverflowError) as fault:
        raise UserError(f"{where} hold what is not a number ({fault}) - correct its file") from None
    unknown = sorted(set(known) - HANDLED)
    if unknown:
        raise UserError(
            f"{where} name {', '.join(unknown)}, which is not offered - leave it out; known are"
            f" {', '.join(sorted(HANDLED))}"
        )
    if not known["do_sample"]:
        numbers = {"repetition_penalty": numbers.get("repetition_penalty", 1.0), "temperature": 0.0}
    stops = tuple(str(stop) for stop in known["until"] if stop not in ("", None))
    settings = GenerationSettings(max_new_tokens=known["max_gen_toks"], stops=stops, **numbers)
    try:
        settings.check()
    except UserError as fault:
        raise UserError(f"{where}: {fault}") from None
    return settings
