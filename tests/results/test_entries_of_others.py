"""Other people's encodings in docs/results/atlas/entries, by their formulas in numpy's float64."""

import numpy as np
import pytest
import torch

from megatron.positions import REGISTRY, Shape, build, load_file
from tests.support import ROOT

SHAPE = Shape(heads=4, head_dim=32, hidden=128, train_length=128)
DISTANCES = np.array([0, 1, 31, 127, 4095])
FREQUENCIES = {
    "half_truncated_rotary": [*np.geomspace(1, 1 / 1024, 8), *np.zeros(8)],
    "learned_frequencies": np.geomspace(1, 10000 ** (-30 / 32), 16),
}
LEARNED = {"dynamic_position_bias": 1252, "half_truncated_rotary": 0, "learned_frequencies": 16}


@pytest.mark.parametrize("name", LEARNED)
def test_a_file_registers_its_encoding_with_the_values_of_the_formula(own_registry, name):
    before = set(REGISTRY)
    load_file(ROOT / "docs/results/atlas/entries" / f"{name}.py")
    assert set(REGISTRY) - before == {name}
    position = build(name, SHAPE)
    numbers = [number.detach().double().numpy() for number in position.parameters()]
    assert sum(number.size for number in numbers) == LEARNED[name]

    if name in FREQUENCIES:
        q, k = position.on_queries_keys(*torch.ones(2, 1, 4, 4096, 32))
        ours = k[0, 0, 4095 - DISTANCES] @ q[0, 0, -1]
        expected = 2 * np.cos(np.outer(DISTANCES, FREQUENCIES[name])).sum(1)  # of two ones
    else:
        ours, values = position.distance_bias(4096)[:, DISTANCES], DISTANCES[None]
        for weight, bias in zip(numbers[:-2:2], numbers[1:-2:2], strict=True):
            values = weight @ values + bias[:, None]
            values = values * (1 + np.tanh(values / 2)) / 2  # silu
        expected = numbers[-2] @ values + numbers[-1][:, None]
    torch.testing.assert_close(ours.double(), torch.tensor(expected), rtol=1e-5, atol=2e-3)
