"""How the next token is drawn from logits, with the meaning that transformers' settings have."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import UserError

MOST_PENALTY = 1_000_000  # and 1 divided by it: beyond any use, and logits stay finite


@dataclass(frozen=True)
class Sampling:
    """What is done to logits before a token is drawn, in this order.

    repetition_penalty: positive logits of tokens that the text already has are divided by it,
        negative ones multiplied (CTRL, arXiv 1909.05858); 1 changes nothing
    temperature: logits are divided by it; 0: the token with the highest logit, nothing is drawn
    top_k: only so many tokens with the highest logits; None: all
    top_p: only the most probable tokens that together reach this probability (arXiv 1904.09751);
        None: all
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def check(self) -> None:
        """UserError with all that is wrong."""
        faults = list(self._faults())
        if faults:
            raise UserError("\n".join(faults))

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.temperature < math.inf:
            yield f"--temperature {self.temperature}: give 0 for the likeliest token, or more"
        if self.top_k is not None and self.top_k < 1:
            yield f"--top-k {self.top_k}: give a number of tokens of at least 1, or leave it out"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"--top-p {self.top_p}: give a probability above 0 and up to 1, or leave it out"
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            penalty = f"--repetition-penalty {self.repetition_penalty}"
            yield f"{penalty}: give a number of {1 / MOST_PENALTY:f} to {MOST_PENALTY}; 1 is none"

    def chosen(
        self, logits: Tensor, texts: Sequence[Sequence[int]], draws: Sequence[float]
    ) -> list[int]:
        """The next token of each text.

        logits [texts, vocab]; texts: their tokens so far; draws: a number from 0 to below 1 for
        each, which decides where something is drawn
        """
        scores = logits.double()
        if self.repetition_penalty != 1:
            scores = penalised(scores, texts, self.repetition_penalty)
        if self.temperature == 0:
            return scores.argmax(dim=-1).tolist()
        # From the highest one on: a tiny temperature makes no infinity of float64.
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            scores = highest(scores, self.top_k)
        if self.top_p is not None:
            scores = nucleus(scores, self.top_p)
        return drawn(scores, draws)


def penalised(scores: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Scores with a penalty for tokens that a text already has: [texts, vocab] -> same."""
    rows = []
    for row, tokens in zip(scores, texts, strict=True):
        index = torch.tensor(sorted(set(tokens)), device=scores.device)
        own = row[index]
        lower = torch.where(own > 0, own / penalty, own * penalty)
        rows.append(row.scatter(0, index, lower))
    return torch.stack(rows)


def highest(scores: Tensor, count: int) -> Tensor:
    """-inf for all scores below the count-th highest: [texts, vocab] -> same."""
    count = min(count, scores.shape[-1])
    least = scores.topk(count).values[:, -1:]
    return scores.masked_fill(scores < least, -math.inf)


def nucleus(scores: Tensor, probability: float) -> Tensor:
    """-inf for all tokens after those that reach the probability: [texts, vocab] -> same."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.masked_fill(before >= probability, -math.inf)
    return kept.gather(-1, order.argsort(dim=-1))


def drawn(scores: Tensor, draws: Sequence[float]) -> list[int]:
    """The token at which the cumulative probability passes each draw: [texts, vocab] -> ids."""
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    places = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None] * total
    # Rounded up to the total, a place would be behind the last token.
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, places.minimum(below), right=True)[:, 0].tolist()
