"""What is skipped gets exactly nothing, and all that could matter is computed."""

import math
import random

import torch

from megatron.attention import BACKENDS
from megatron.attention.eager import all_scores
from megatron.attention.first_keys import GRAIN, first_keys
from megatron.attention.terms import Terms
from tests.attention import random_cases

KEYS = 1300
LEAST = math.log(2.0**-150)  # e to this is half of float32's least number


def table(draw, heads):
    """Tables that fall, stay, or have a bump: [heads, KEYS], or None."""
    distance = torch.arange(KEYS).float()
    slope = 10 ** torch.tensor([[draw.uniform(-2.5, 1)] for _ in range(heads)])
    falling = -slope * distance
    bump = 300 * torch.exp(-(((distance - 700) / 50) ** 2))
    flat = -slope * distance.clamp(max=draw.randrange(10, KEYS))
    return draw.choice([falling, flat, falling + bump, None])


def case(number, *, scale=None):
    """Inputs that search for a counterexample: huge or opposite q and k, tables that rise.

    scale: the largest number of q and k, if not drawn
    """
    draw = random.Random(number)
    torch.manual_seed(number)
    batch, heads, head_dim = draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([8, 16])
    queries = draw.choice([KEYS, KEYS - 77, 300, GRAIN])
    k = torch.randn(batch, heads, KEYS, head_dim) * 10 ** draw.uniform(-2, 2)
    q = torch.randn(batch, heads, queries, head_dim) * k.abs().max() / 3
    if draw.random() < 0.4:  # as far from the own key, and as near to others, as can be
        q = -k[:, :, KEYS - queries :].clone()
        k[:, :, ::7] = -k[:, :, KEYS - 1 :]
    if scale is not None:
        q, k = scale * q / q.abs().max(), scale * k / k.abs().max()
    tensors = {"q": q, "k": k, "v": torch.randn(batch, heads, KEYS, head_dim)}
    bias = table(draw, heads)
    if bias is not None:
        tensors["bias"] = bias
    if bias is None or draw.random() < 0.4:
        steps = torch.rand(batch, heads, KEYS, 1, dtype=torch.float64) * 10 ** draw.uniform(-2, 1)
        if draw.random() < 0.3:
            steps = steps - steps.mean()
        tensors["w"] = steps.cumsum(2)
        if draw.random() < 0.6:
            tensors["u"] = torch.rand(batch, heads, queries, 1) * draw.choice([1, -1]) + 0.2
    options: dict = {"window": draw.choice([None, None, 100, 700])}
    if draw.random() < 0.3:
        options["segments"] = torch.randint(0, 2, (batch, KEYS)).cumsum(1) // draw.choice([50, 300])
    return random_cases.Inputs(tensors, torch.randn(*q.shape), options=options)


def firsts_of(inputs):
    return inputs.attend(lambda q, k, v, terms: (first_keys(q, k, terms), None), inputs.tensors)[0]


def below_most(inputs):
    """Scores less the highest of a query, by the definition in float64; -inf where mbounded."""
    double = {name: x.double() for name, x in inputs.tensors.items()}
    scores, *_ = inputs.attend(lambda q, k, v, terms: (all_scores(q, k, terms), None), double)
    return scores - scores.amax(-1, keepdim=True)


def test_no_key_is_skipped_that_would_get_anything():
    bounded = 0
    for number in range(12):
        inputs = case(number)
        firsts = firsts_of(inputs)
        if firsts is None:
            continue
        bounded += 1
        exact = below_most(inputs)
        for grain, starts in enumerate(firsts):
            rows = slice(grain * GRAIN, (grain + 1) * GRAIN)
            for head, first_key in enumerate(starts):
                assert (exact[:, head, rows, :first_key] < LEAST).all(), (number, grain, head)
    assert bounded >= 3


def test_values_and_gradients_are_those_of_the_definition():
    bounded = 0
    for number in range(6):
        inputs = case(number, scale=1.0)
        if firsts_of(inputs) is not None:
            bounded += 1
            assert random_cases.largest_error(BACKENDS["sdpa"], inputs) < 2e-5, number
    assert bounded >= 2


def test_keys_beyond_the_reach_of_a_steep_bias_are_skipped():
    q, k = torch.zeros(2, 1, 2, KEYS, 8)
    table = -0.5 * torch.arange(KEYS).float().expand(2, -1)  # nothing beyond 210
    firsts = first_keys(q, k, Terms(table))
    assert firsts is not None
    for grain, starts in enumerate(firsts):
        least = max(0, GRAIN * grain - 210)
        assert all(least - 2 * GRAIN <= first <= least for first in starts)
    assert firsts[-1][0] > 0
