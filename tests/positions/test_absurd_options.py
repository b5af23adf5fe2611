"""Any value of any option is refused in one message, or gives an encoding without NaN."""

import itertools
import math

import pytest
import torch

from megatron.conformance.subject import effects_before
from megatron.errors import UserError
from megatron.positions import REGISTRY, Shape, build, options_of
from megatron.positions.outline import Outline
from tests.support import NEEDED

SHAPE = Shape(heads=4, head_dim=8, hidden=32, train_length=16)
LENGTH = 40  # beyond the training length
VALUES = [
    *(0, -1, 1, 7, 2.5, 1e-12, 1e-308, 1e12, 1e308, 10**9, 2**24, 10**400, math.inf, math.nan),
    *(True, None, "", "yarn", "learned", [], [1], [math.nan] * 4, [1e12] * 4, [[1]] * 4),
    *(["alibi"] * 65, {}, {"base": math.nan}, {"alibi": 1e308}),
]
PARTNERS = [
    {},
    {"scaling": "yarn", "factor": 2.0},
    {"learned_slopes": True},
    {"weights": "learned"},
]


@pytest.mark.parametrize("name", REGISTRY)
def test_an_absurd_option_is_a_message_or_a_sane_encoding(name):
    options = options_of(name)
    partners = [partner for partner in PARTNERS if partner.keys() <= options.keys()]
    for option, partner, value in itertools.product(options, partners, VALUES):
        chosen = {**NEEDED.get(name, {}), **partner, option: value}
        try:
            with Outline():  # as a configuration is checked
                build(name, SHAPE, **chosen)
            huge = isinstance(value, (int, float)) and value and value > 2**20
            if huge and option in ("max_positions", "num_buckets", "range"):
                continue
            position = build(name, SHAPE, **chosen).eval()
            with torch.no_grad():
                made = effects_before(position, LENGTH)
        except UserError:
            continue
        for tensor in [*position.parameters(), *position.buffers()]:
            assert tensor.isfinite().all(), (chosen, tensor)
        for hook, effect in made.items():
            assert not effect.isnan().any(), (chosen, hook)
