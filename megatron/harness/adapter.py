"""Our model behind the interface of lm-evaluation-harness. Only `harness.run` imports this."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows

from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.evaluation.progress import progress
from megatron.generation.decoding import Decoding, decode
from megatron.generation.run import Continuation, batches
from megatron.generation.written import Written
from megatron.harness.scores import Asked, Reading, Scored, scored
from megatron.harness.wanted import wanted_by
from megatron.model import GPT
from megatron.parallel.grid import Grid


class Harness(TemplateLM):
    """A GPT with its tokenizer, as the harness asks for it.

    Every process of the grid gets all requests and computes its share; the harness itself sees
    one process. A text has the numbers that it has alone.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, reading: Reading, grid: Grid) -> None:
        super().__init__()
        self._model, self._ours = model, tokenizer
        self._reading, self._grid = reading, grid

    @property
    def eot_token_id(self) -> int:
        return self._ours.eod

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at most."""
        return self._reading.length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text. Our tokenizers add none."""
        return list(self._ours.encode(string))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(text, context, continuation) of each -> log-likelihood in nats, and whether greedy."""
        asked = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"--lengths {self.max_length}: a task scores {len(continuation)} tokens at once"
                    " - give a longer length"
                )
            # The model reads all tokens but the last one.
            tokens = (context + continuation)[-self.max_length - 1 :]
            asked.append(Asked(tokens, len(continuation)))
        return [(one.log_likelihood, one.greedy) for one in self._scored(asked)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood in nats of each text, each token of which is scored once."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for one in self.windows_of(self.tok_encode(text)):
                windows.append(one)
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, result in zip(owners, self._scored(windows), strict=True):
            totals[number] += result.log_likelihood
        return totals

    def windows_of(self, tokens: list[int]) -> list[Asked]:
        """The windows of a text behind the end of another one, as the harness cuts them."""
        pairs = get_rolling_token_windows(
            token_list=tokens,
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=self.max_length - self._reading.stride + 1,
        )
        return [Asked([*read, predicted[-1]], len(predicted)) for read, predicted in pairs]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, without the string that ends it."""
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        for numbers in by_settings.values():
            settings = requests[numbers[0]].args[1]
            texts = {number: requests[number].args[0] for number in numbers}
            found |= self._continued(texts, settings)
        return [found[number] for number in range(len(requests))]

    def _scored(self, asked: Sequence[Asked]) -> list[Scored]:
        """What is asked, while a bar or lines of the log say how far it is."""
        with progress("log-likelihood", shown=self._grid.first) as display:
            return scored(
                self._model,
                asked,
                batch_tokens=self._reading.batch_tokens,
                grid=self._grid,
                advance=partial(display.advance, self.max_length),
            )

    def _continued(self, texts: Mapping[int, str], settings: Mapping[str, Any]) -> dict[int, str]:
        """The continuations of texts with the same settings, by number."""
        wanted = wanted_by(settings)
        room = self.max_length - wanted.most
        if room < 1:
            raise UserError(
                f"--lengths {self.max_length}: a task asks for {wanted.most} new tokens, which"
                " leaves no place for its text - give a longer length"
            )
        asked = []
        for number, text in texts.items():
            # As in the harness, a text that is too long loses its beginning.
            prompt = self.tok_encode(text)[-room:] or [self.eot_token_id]
            written = Written(self._ours, prompt, wanted.stops)
            asked.append(Continuation(prompt, seed=(0, number), written=written, number=number))
        how = Decoding(
            wanted.sampling, wanted.most, vocab=self._ours.vocab_size, end=self.eot_token_id
        )
        together = list(batches(asked, self._texts_at_once(), wanted.most))
        own = together[self._grid.rank :: self._grid.ranks]
        count = sum(map(len, own))
        mine: dict[int, str] = {}
        with progress("continuations", shown=self._grid.first) as display:
            for batch in own:
                for _ in decode(self._model, batch, how):
                    pass
                mine |= {text.number: text.written.text for text in batch if text.written}
                display.advance(self.max_length, len(mine), count)
        everybody: dict[int, str] = {}
        for found in self._grid.gather(mine):
            everybody |= found
        return everybody

    def _texts_at_once(self) -> int:
        return max(1, self._reading.batch_tokens // self.max_length)
