"""What is done to logits, against transformers' own processors, and how tokens are drawn."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.errors import UserError
from megatron.generation.sampling import MOST_PENALTY, Sampling, drawn, highest, nucleus, penalised

TEXTS = [[1, 5, 5, 7], [2, 2, 2, 2], [0, 30, 4, 9]]


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(3, 40)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(logits, penalty):
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    expected = theirs(torch.tensor(TEXTS), logits.clone())
    torch.testing.assert_close(penalised(logits, TEXTS, penalty), expected)


@pytest.mark.parametrize("count", [1, 5, 39, 40, 1000])
def test_top_k_is_that_of_transformers(logits, count):
    expected = TopKLogitsWarper(count)(torch.tensor(TEXTS), logits)
    assert torch.equal(highest(logits, count), expected)


@pytest.mark.parametrize("probability", [0.01, 0.5, 0.9, 0.999])
def test_top_p_is_that_of_transformers(logits, probability):
    expected = TopPLogitsWarper(probability)(torch.tensor(TEXTS), logits)
    assert torch.equal(nucleus(logits, probability), expected)


def test_probabilities_are_those_of_transformers_in_its_order(logits):
    """All four settings together; the share of each token over a grid of draws."""
    ids, expected = torch.tensor(TEXTS), logits.clone()
    for theirs in (
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(10),
        TopPLogitsWarper(0.8),
    ):
        expected = theirs(ids, expected)
    ours = Sampling(temperature=0.7, top_k=10, top_p=0.8, repetition_penalty=1.2)
    grid, counts = 4000, torch.zeros(3, 40)
    for step in range(grid):
        for row, token in enumerate(ours.chosen(logits, TEXTS, [(step + 0.5) / grid] * 3)):
            counts[row, token] += 1
    torch.testing.assert_close(counts / grid, expected.softmax(-1), rtol=0, atol=1.01 / grid)


def test_temperature_0_takes_the_likeliest_after_the_penalty():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    assert Sampling(temperature=0).chosen(logits, [[0]], [0.5]) == [0]
    assert Sampling(temperature=0, repetition_penalty=1.5).chosen(logits, [[0]], [0.5]) == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_a_tiny_temperature_is_the_likeliest_token(logits, temperature):
    chosen = Sampling(temperature=temperature).chosen(logits, TEXTS, [0.0, 0.5, 1 - 1e-12])
    assert chosen == logits.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [1 / MOST_PENALTY, MOST_PENALTY])
def test_the_largest_penalties_leave_numbers_that_can_be_drawn(penalty):
    logits = torch.tensor([[-3e38, 0.0, 3e38]])
    settings = Sampling(repetition_penalty=penalty)
    settings.check()
    (token,) = settings.chosen(logits, [[0, 1, 2]], [1 - 1e-12])
    assert token == 2


@pytest.mark.parametrize("draw", [0.0, 0.3, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(draw):
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert drawn(scores, [draw])[0] in (1, 3)


def test_draws_below_a_cumulative_probability_take_its_token():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().double().repeat(5, 1)
    assert drawn(scores, [0.05, 0.15, 0.35, 0.65, 0.99]) == [0, 1, 2, 3, 3]


def test_all_that_is_wrong_is_said_at_once():
    wrong = Sampling(temperature=-1, top_k=0, top_p=1.5, repetition_penalty=0)
    with pytest.raises(UserError) as fault:
        wrong.check()
    assert str(fault.value) == (
        "--temperature -1: give 0 for the likeliest token, or more\n"
        "--top-k 0: give a number of tokens of at least 1, or leave it out\n"
        "--top-p 1.5: give a probability above 0 and up to 1, or leave it out\n"
        "--repetition-penalty 0: give a number of 0.000001 to 1000000; 1 is none"
    )


@pytest.mark.parametrize("temperature", [math.nan, math.inf])
def test_a_temperature_is_a_finite_number(temperature):
    with pytest.raises(UserError, match="--temperature"):
        Sampling(temperature=temperature).check()
