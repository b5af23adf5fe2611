"""Log-likelihoods of continuations: each as if alone, whatever the batch and the processes."""

from contextlib import suppress

import pytest
import torch

from megatron.harness.scores import Asked, scored
from megatron.parallel.grid import Grid
from tests.encodings import every_signature
from tests.model.test_cache import model

ALONE = Grid()


def asked(*lengths_and_scored: tuple[int, int]) -> list[Asked]:
    return [
        Asked(torch.randint(50, (length,)).tolist(), count) for length, count in lengths_and_scored
    ]


@torch.no_grad()
def by_hand(gpt, one: Asked) -> tuple[float, bool]:
    """One whole pass in float64, and the logarithm of the softmax."""
    ids = torch.tensor([one.tokens])
    log_p = gpt(ids)[0].double().log_softmax(-1)
    places = range(len(one.tokens) - one.scored, len(one.tokens))
    total = sum(log_p[place - 1, one.tokens[place]].item() for place in places)
    greedy = all(log_p[place - 1].argmax().item() == one.tokens[place] for place in places)
    return total, greedy


@every_signature
def test_each_text_has_the_numbers_that_it_has_alone(name):
    gpt = model(name)
    texts = asked((30, 3), (2, 1), (60, 59), (31, 30), (7, 2), (60, 1))
    expected = [by_hand(gpt, one) for one in texts]
    for batch_tokens in (1, 100, 10_000):
        found = scored(gpt, texts, batch_tokens=batch_tokens, grid=ALONE)
        for (log_likelihood, greedy), result in zip(expected, found, strict=True):
            assert result.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)
            assert result.greedy == greedy


def test_the_likeliest_continuation_is_greedy_and_another_is_not():
    gpt = model("rotary")
    ids = [3, 1, 4]
    for _ in range(5):
        ids.append(int(gpt(torch.tensor([ids]))[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 50]
    found = scored(gpt, [Asked(ids, 5), Asked(other, 5)], batch_tokens=100, grid=ALONE)
    assert [one.greedy for one in found] == [True, False]


def test_the_numbers_do_not_depend_on_how_many_processes_share_them():
    gpt, texts = model("mep_free"), asked(*[(length, 2) for length in range(3, 40)])
    whole = scored(gpt, texts, batch_tokens=120, grid=ALONE)

    class Recorded(Grid):
        def gather(self, value):
            shares.append(value)
            return [value] * self.ranks

    shares: list[dict] = []
    for rank in range(3):
        with suppress(KeyError):  # a share is no whole
            scored(gpt, texts, batch_tokens=120, grid=Recorded(rank, 3))
    together = shares[0] | shares[1] | shares[2]
    assert [together[number] for number in range(len(texts))] == whole
    assert all(shares)


def test_nothing_asked_is_no_work():
    assert scored(model("none"), [], batch_tokens=10, grid=ALONE) == []
