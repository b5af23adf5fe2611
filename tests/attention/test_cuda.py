"""Every backend on CUDA, compiled, at real sizes, against the definition in float64."""

from functools import partial

import pytest
import torch

from megatron.attention import BACKENDS, attention
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


def test_auto_is_triton_with_a_table_and_flash_without(monkeypatch):
    acted = []

    def noted(name, function, *tensors, **more):
        acted.append(name)
        return function(*tensors, **more)

    for name in ("sdpa", "triton"):
        monkeypatch.setitem(BACKENDS, name, partial(noted, name, BACKENDS[name]))
    q, k, v = torch.randn(3, 2, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, k, v, torch.randn(4, 512, device="cuda"))
    assert set(acted) == {"triton"}
    acted.clear()
    attention(q, k, v)
    assert acted == ["sdpa"]
