"""Every backend on CUDA, compiled, at real sizes, against the definition in float64."""

import pytest
import torch

from megatron.attention import BACKENDS
from tests.attention.random_cases import Case, error_of

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
every_backend = pytest.mark.parametrize("backend", ["sdpa", "triton"])


@every_backend
@pytest.mark.parametrize("length", [512, 2048, 4096])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_at_real_lengths_are_those_of_the_definition(backend, dtype, length):
    case = Case(heads=4, queries=length, keys=length, head_dim=64)
    assert error_of(case, BACKENDS[backend], dtype, "cuda") < TOLERANCE[dtype]
