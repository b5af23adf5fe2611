"""Whether a bias is (conditionally) positive definite, against kernels of which it is known."""

import math

import pytest
import torch

from megatron.conformance.finding import FACT, FAILS, HOLDS, NOT_APPLICABLE
from megatron.conformance.kernels import (
    CLAIM,
    SIZES,
    conditionally_positive_definite,
    definiteness,
    smallest_eigenvalue,
    smallest_shift,
    toeplitz,
)
from megatron.conformance.subject import Subject
from megatron.positions import REGISTRY

D = torch.arange(SIZES[-1], dtype=torch.float64)
CLAIMING = sorted(name for name, encoding in REGISTRY.items() if CLAIM in encoding.claims)

# Schoenberg: -d^p is conditionally positive definite for 0 < p <= 2 and for no other p.
CONDITIONALLY = {
    "-d^0.5": -D.sqrt(),
    "-d": -D,
    "-d^2": -D.square(),
    "-log(1 + d)": -D.log1p(),
    "cos": torch.cos(0.3 * D),
    "exp(-d^2)": torch.exp(-D.square() / 50),
    "triangle": (1 - D / 20).clamp(min=0),
}
NOT_EVEN = {
    "-d^2.01": -(D**2.01),
    "-d^3": -(D**3),
    "+d": D,
    "box": (D < 5).double(),
}


@pytest.mark.parametrize("name", CONDITIONALLY)
def test_known_kernels_are_conditionally_positive_definite(name):
    kernel = CONDITIONALLY[name][None]
    assert not smallest_eigenvalue(kernel, sum_is_zero=True).is_negative
    # ... and then the powers of exp are positive definite
    for power in (0.01, 1, 3):
        assert not smallest_eigenvalue((power * kernel).exp()).is_negative


@pytest.mark.parametrize("name", NOT_EVEN)
def test_known_counterexamples_are_found(name):
    assert smallest_eigenvalue(NOT_EVEN[name][None], sum_is_zero=True).is_negative


@pytest.mark.parametrize("name", ["cos", "exp(-d^2)", "triangle"])
def test_kernels_with_a_spectrum_are_positive_definite_as_they_are(name):
    assert not smallest_eigenvalue(CONDITIONALLY[name][None]).is_negative


def test_the_worst_head_and_size_are_named():
    worst = smallest_eigenvalue(torch.stack([-D, -(D**3), -D]), sum_is_zero=True)
    assert worst.is_negative
    assert worst.head == 1


def test_the_smallest_shift_of_alibi_is_half_the_longest_distance():
    """The distance matrix of points on a line has 1ᵀD⁻¹1 = 2 / longest distance."""
    assert smallest_shift(-0.25 * D[None]) == pytest.approx(0.25 * (SIZES[-1] - 1) / 2, rel=1e-9)


@pytest.mark.parametrize("name", ["-d^0.5", "-d", "-log(1 + d)"])
def test_less_than_the_smallest_shift_is_too_little(name):
    kernel = CONDITIONALLY[name][None]
    shift = smallest_shift(kernel)
    slightly = 1e-6 * shift
    enough = torch.linalg.eigvalsh(toeplitz(kernel + shift + slightly))
    too_little = torch.linalg.eigvalsh(toeplitz(kernel + shift - slightly))
    assert enough.min() > 0 > too_little.min()


def test_no_constant_makes_a_parabola_positive_definite():
    assert math.isinf(smallest_shift(-D.square()[None]))


def test_what_kerple_claims_is_claimed():
    assert {"alibi", "kerple_log", "kerple_power", "kerple_log_3para"} <= set(CLAIMING)


@pytest.mark.parametrize("name", CLAIMING)
def test_claims_hold_for_other_first_values(name):
    for seed in range(1, 4):
        assert definiteness(Subject(name).position(seed)).verdict == HOLDS


def test_a_finding_says_what_was_found():
    alibi = conditionally_positive_definite(Subject("alibi"))
    assert alibi.verdict == HOLDS
    assert alibi.detail == "on 32 and 256 tokens; positive definite on 256 with 31.9 added"
    gaussian = conditionally_positive_definite(Subject("gaussian"))
    assert gaussian.detail == "on 32 and 256 tokens; no constant makes it positive definite"
    bump = conditionally_positive_definite(Subject("kerple_bias_2para"))
    assert bump.detail == "on 32 and 256 tokens; positive definite as it is"
    mixture = conditionally_positive_definite(Subject("mep_param"))
    assert mixture.verdict == FACT
    assert mixture.detail.endswith("; exp(bias) is positive definite, as MEP's kernels are")
    assert conditionally_positive_definite(Subject("rotary")).verdict == NOT_APPLICABLE


def test_a_claim_that_does_not_hold_is_a_fault(monkeypatch):
    assert conditionally_positive_definite(Subject("t5")).verdict == FACT
    monkeypatch.setattr(REGISTRY["t5"], "claims", (CLAIM,))
    assert conditionally_positive_definite(Subject("t5")).verdict == FAILS


def test_the_encoding_stays_in_float32():
    position = Subject("kerple_log").position()
    definiteness(position)
    assert {value.dtype for value in position.parameters()} == {torch.float32}
