"""A bias by content, u·w, keeps its digits: in half precision, and for far sums.

Random cases (test_backends.py, test_random.py) compare values and gradients with the definition.
"""

import importlib.util

import pytest
import torch

from megatron.attention import BACKENDS
from tests.attention.random_cases import Case, inputs_of, values_and_gradients

HAS_TRITON = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
NAMES = ["eager", "sdpa", *(["triton"] if HAS_TRITON else [])]
every_backend = pytest.mark.parametrize("backend", NAMES)


def inputs(backend, *, ones, dtype=torch.float32):
    keys = 70 if backend == "triton" else 300  # interpreted, it is slow
    case = Case(batch=1, heads=2, queries=keys, keys=keys, content=1, ones=ones)
    return inputs_of(case, dtype)


def difference(ours, exact):
    """The largest, relative to the largest exact value of each tensor, at least 1."""
    assert ours.keys() == exact.keys()
    differences = []
    for name, expected in exact.items():
        largest = max(1.0, expected.abs().max().item())
        differences.append((ours[name].double() - expected).abs().max().item() / largest)
    return max(differences)


@every_backend
def test_half_precision_rounds_inputs_and_not_the_bias(backend):
    for ones in (False, True):
        case_inputs = inputs(backend, ones=ones, dtype=torch.float16)
        case_inputs.tensors["w"] *= 20
        exact = values_and_gradients(BACKENDS["eager"], case_inputs, double=True)
        ours = values_and_gradients(BACKENDS[backend], case_inputs)
        # Biases near 200 would be rounded by 0.5. Only values, probabilities and the output are.
        rounding = torch.finfo(torch.float16).eps * case_inputs.tensors["v"].abs().max()
        assert (ours["out"].double() - exact["out"]).abs().max() <= rounding
        assert difference(ours, exact) <= 0.03


@every_backend
def test_far_sums_lose_no_digits(backend):
    """Sums of 10^5 are exact to 0.008 in float32. What counts differs by a few from key to key."""
    for ones in (False, True):
        case_inputs = inputs(backend, ones=ones)
        steps = torch.rand(case_inputs.tensors["w"].shape, dtype=torch.float64)
        case_inputs.tensors["w"] = steps.cumsum(2)
        if not ones:
            case_inputs.tensors["u"] = case_inputs.tensors["u"].abs()
        exact = values_and_gradients(BACKENDS["eager"], case_inputs, double=True)
        case_inputs.tensors["w"] = 1e5 + case_inputs.tensors["w"]
        assert difference(values_and_gradients(BACKENDS[backend], case_inputs), exact) <= 3e-5
