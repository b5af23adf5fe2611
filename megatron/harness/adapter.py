"""Our model behind the interface of lm-evaluation-harness. Only `harness.tasks` imports this.

The harness's own HFLM needs accelerate, and computes texts of one pass with tokens of padding.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.generation.decode import Continuation, GenerationSettings, decode
from megatron.model import GPT

TOGETHER = 512  # targets whose logits exist at once
USUAL_NEW_TOKENS = 256  # if a task names no number, as the harness has it
SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "repetition_penalty": float}
HANDLED = {"do_sample", "until", "max_gen_toks", *SAMPLING}
CUT = "%d of %d texts are longer than %d tokens, up to %d: they lost their beginning"

logger = logging.getLogger(__name__)


class Harness(TemplateLM):
    """A GPT with its tokenizer, as the harness asks for it.

    length: tokens that the model sees at most; a longer context loses its beginning
    stride: of rolling windows, tokens that they move by; batch_tokens: of a forward pass at most

    A text has the numbers that it has alone.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, length: int, stride: int, batch_tokens: int = 16384
    ) -> None:
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self._length, self._stride, self._batch_tokens = length, stride, batch_tokens

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows."""
        begin = self._model.begin_of_text
        return self._tokenizer.eod if begin is None else begin

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at most."""
        return self._length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text, behind the one with which the model's texts begin, if there is one."""
        tokens = list(self._tokenizer.encode(string))
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
        texts = []
        self._warn_of_cuts([len(context) + len(more) - 1 for _, context, more in requests])
        for words, context, continuation in requests:
            count = len(continuation)
            if not count:
                raise UserError(
                    f"--tasks: the continuation {words[1]!r:.80} of {words[0][-80:]!r} has no"
                    " tokens - correct the task's file"
                )
            if count > self._length:
                raise UserError(
                    f"--lengths {self._length}: a task scores {count} tokens at once"
                    " - give a longer length"
                )
            # The model reads all tokens but the last one.
            texts.append(((context + continuation)[-self._length - 1 :], count))
        return self.scored(texts)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood in nats of each text, each token of which is scored once.

        Windows are those of the harness, behind the end of another text.
        """
        windows, owners = [], []
        for number, request in enumerate(requests):
            for read, predicted in get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._length,
                context_len=self._length - self._stride + 1,
            ):
                windows.append(([*read, predicted[-1]], len(predicted)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_likelihood, _) in zip(owners, self.scored(windows), strict=True):
            totals[number] += log_likelihood
        return totals

    @torch.inference_mode()
    def scored(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """Log-likelihoods in nats, and whether each scored token was the likeliest one.

        texts: tokens, and how many of them are scored: the last ones, each behind all before it

        Batches hold texts of similar lengths, the longest first: they show what fits.
        """
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number][0]))
        scores: dict[int, tuple[float, bool]] = {}
        device = self._model.word_embeddings.weight.device
        with tqdm(total=len(texts), desc="log-likelihood") as progress:
            while numbers := order[len(scores) :]:
                numbers = numbers[: max(1, self._batch_tokens // len(texts[numbers[0]][0]))]
                # What is behind the end of a shorter text changes nothing before it.
                tokens = [torch.tensor(texts[number][0], device=device) for number in numbers]
                ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
                features = self._model.features(ids[:, :-1])
                for x, targets, number in zip(features, tokens, numbers, strict=True):
                    count = texts[number][1]
                    x = x[len(targets) - 1 - count : len(targets) - 1].split(TOGETHER)
                    total, greedy = 0.0, True
                    for part, labels in zip(x, targets[-count:].split(TOGETHER), strict=True):
                        logits = self._model.logits(part).float()
                        losses = F.cross_entropy(logits, labels, reduction="none")
                        total -= losses.double().sum().item()
                        greedy = greedy and torch.equal(logits.argmax(dim=-1), labels)
                    scores[number] = total, greedy
                progress.update(len(numbers))
        return [scores[number] for number in range(len(texts))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, without the string that ends it.

        As in the harness, its tokens are decoded alone, and special ones have no text.
        """
        sizes = []
        by_settings: dict[GenerationSettings, list[Continuation]] = {}
        for number, request in enumerate(requests):
            text, kwargs = request.args
            settings = settings_by(kwargs)
            room = self._length - settings.max_new_tokens
            if room < 1:
                raise UserError(
                    f"--lengths {self._length}: a task asks for {settings.max_new_tokens} new"
                    " tokens, which leaves no place for its text - give a longer length"
                )
            # As in the harness, a text that is too long loses its beginning.
            prompt = self.tok_encode(text)
            sizes.append(len(prompt) + settings.max_new_tokens)
            text = Continuation(self._tokenizer, prompt[-room:], settings, number)
            by_settings.setdefault(settings, []).append(text)
        self._warn_of_cuts(sizes)
        most = max(1, self._batch_tokens // self._length)
        token_bytes = self._tokenizer.token_bytes()
        answers: dict[int, str] = {}
        with tqdm(total=len(requests), desc="continuations") as progress:
            for settings, texts in by_settings.items():
                for step in decode(self._model, self._tokenizer.vocab_size, texts, most):
                    for text in step:
                        if text.ended is None:
                            continue
                        new = text.tokens[len(text.prompt) :]
                        if token_bytes is not None:
                            new = [token for token in new if token_bytes[token]]
                        answer = self._tokenizer.decode(new)
                        for stop in settings.stops:
                            answer, _, _ = answer.partition(stop)
                        answers[text.number] = answer
                        progress.update()
        return [answers[number] for number in range(len(requests))]

    def _warn_of_cuts(self, sizes: Sequence[int]) -> None:
        """Warn of texts that lose their beginning; sizes: tokens of each with its continuation."""
        cut = sum(size > self._length for size in sizes)
        if cut:
            counts = cut, len(sizes), self._length, max(sizes)
            logger.warning(CUT, *counts)


def settings_by(kwargs: Mapping[str, Any]) -> GenerationSettings:
    """The settings that generation_kwargs of a task mean; UserError for others."""
    where = "--tasks: generation_kwargs of a task"
    try:
        values: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), USUAL_NEW_TOKENS))
        numbers = {
            name: kind(values[name])
            for name, kind in SAMPLING.items()
            if values.get(name) is not None
        }
    except (TypeError, ValueError, OverflowError) as fault:
        raise UserError(f"{where} hold what is not a number ({fault}) - correct its file") from None
    if unknown := sorted(values.keys() - HANDLED):
        raise UserError(
            f"{where} name {', '.join(unknown)}, which is not offered - leave it out; known are"
            f" {', '.join(sorted(HANDLED))}"
        )
    if not values["do_sample"]:
        numbers = {"repetition_penalty": numbers.get("repetition_penalty", 1.0), "temperature": 0.0}
    stops = tuple(str(stop) for stop in values["until"] if stop not in ("", None))
    settings = GenerationSettings(max_new_tokens=values["max_gen_toks"], stops=stops, **numbers)
    try:
        settings.check()
    except UserError as fault:
        raise UserError(f"{where}: {fault}") from None
    return settings
