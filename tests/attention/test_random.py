"""Our Triton programs are the definition in float64 on random shapes and options.

Interpreted on the CPU in the suite, `make fuzz` runs more, and compiled where a GPU is.
"""

import os

import pytest
import torch

from megatron.attention.triton_kernel import triton_attention
from tests.attention.random_cases import error_of, random_case

pytest.importorskip("triton")

CASES = max(30, int(os.environ.get("FUZZ_EXAMPLES", "0")))
CASES_OF_A_TEST = 15  # so that processes share them
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
# Half of the cases are float32, whose errors show the smallest mistakes.
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture
def bfloat16_products(monkeypatch):
    """Triton's interpreter multiplies the bits of bfloat16; the GPU multiplies the numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder, a, b, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (builder.cast_impl(x, tl.float32) for x in (a, b))
        return multiply(builder, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for CPUs")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond the last query divide 0 by 0
@pytest.mark.parametrize("first", range(0, CASES, CASES_OF_A_TEST))
def test_random_cases_are_those_of_the_definition(first, bfloat16_products):
    for number in range(first, first + CASES_OF_A_TEST):
        # The interpreter is slow; some cases have several tiles each way.
        case = random_case(number, 90 if number % 20 == 0 else 40)
        dtype = DTYPES[number % 4]
        assert error_of(case, triton_attention, dtype, "cpu") < TOLERANCE[dtype], (case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 48, 4))  # compiling takes most of the time
def test_random_cases_on_a_gpu_are_those_of_the_definition(first):
    for number in range(first, first + 4):
        case, dtype = random_case(number, 700, (64, 40, 128)), DTYPES[number % 4]
        assert error_of(case, triton_attention, dtype, "cuda") < TOLERANCE[dtype], (case, dtype)
