"""Kernels of which it is known whether they are (conditionally) positive definite."""

import math

import torch

from megatron.conformance.kernels import (
    CLAIM,
    SIZES,
    definiteness,
    examine_learned,
    in_the_region,
    smallest_eigenvalues,
    within_bounds,
    worst_of,
)
from megatron.conformance.subject import FACT, FAILS, HOLDS, NOT_APPLICABLE, Subject
from megatron.positions import REGISTRY, Position
from megatron.positions.layers import Placed
from tests.support import fill

HEADS = 4
D = torch.arange(SIZES[-1], dtype=torch.float64)
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
NOT_EVEN = {"-d^2.01": -(D**2.01), "-d^3": -(D**3), "+d": D, "box": (D < 5).double()}


def is_negative(kernel, **options) -> bool:
    return worst_of(smallest_eigenvalues(kernel[None], **options)).is_negative


def test_known_kernels_and_counterexamples():
    for name, kernel in CONDITIONALLY.items():
        assert not is_negative(kernel, sum_is_zero=True), name
        for power in (0.01, 1, 3):  # then the powers of exp are positive definite
            assert not is_negative((power * kernel).exp()), name
        has_spectrum = name in ("cos", "exp(-d^2)", "triangle")
        assert is_negative(kernel) == (not has_spectrum), name
    for name, kernel in NOT_EVEN.items():
        assert is_negative(kernel, sum_is_zero=True), name


def test_claims_hold_for_other_first_values():
    claiming = {name for name, encoding in REGISTRY.items() if CLAIM in encoding.claims}
    assert {"alibi", "kerple_log", "kerple_power", "kerple_log_3para"} <= claiming
    for name in claiming:
        for seed in range(3):
            assert definiteness(Subject(name).position(seed)).verdict == HOLDS, name


def test_a_finding_says_what_was_found_and_a_broken_claim_is_a_fault(monkeypatch):
    assert definiteness(Subject("alibi").position()).detail == "on 32 and 256 tokens"
    mixture = definiteness(Subject("mep_param").position())
    assert mixture.verdict == FACT
    assert "; exp(bias) is positive definite, as MEP's kernels are" in mixture.detail
    assert definiteness(Subject("rotary").position()).verdict == NOT_APPLICABLE
    t5 = Subject("t5").position()
    assert definiteness(t5).verdict == FACT
    monkeypatch.setattr(REGISTRY["t5"], "claims", (CLAIM,))
    assert definiteness(t5).verdict == FAILS
    assert t5.weight.dtype == torch.float32


def learned(name: str, **values: list[float]) -> Position:
    position = Subject(name).position()
    fill(position, {key: torch.tensor(value) for key, value in values.items()})
    return position


def test_first_values_are_inside_and_bounds_are_exact_in_float32():
    for name in ("kerple_log", "kerple_power", "kerple_log_3para", "bam", "ape_decay"):
        position = Subject(name).position()
        assert within_bounds(position).verdict == HOLDS
        assert in_the_region(position).verdict == HOLDS
    # 0.01 is 0.0099999998 in float32, and is not below itself.
    position = learned("kerple_log", p=[0.01] * HEADS, a=[0.01, 1, 2, 3])
    assert within_bounds(position).verdict == HOLDS


def test_a_stored_number_below_its_floor_is_named_with_what_acts():
    position = learned("kerple_log", p=[1, 0.001, 1, -2], a=[1.0] * HEADS)
    finding = within_bounds(position)
    assert finding.verdict == FACT
    assert finding.detail == (
        "p of head 1 is stored as 0.001 and acts as 0.01; p of head 3 is stored as -2 and acts as"
        " 0.01"
    )
    # KERPLE's theorem asks for r1 > 0 alone, and what acts is positive definite.
    assert in_the_region(position).detail == "p of head 3 is stored as -2 and acts as 0.01"
    assert definiteness(position).verdict == HOLDS
    many = learned("kerple_log", p=[-1.0] * HEADS, a=[-1.0] * HEADS)
    assert in_the_region(many).detail.endswith("; and 4 more")


def test_schoenbergs_bound_on_the_power():
    for power, inside in ((1.999, True), (2.0, True), (2.001, False)):
        position = learned("kerple_power", a=[1.0] * HEADS, p=[1.0, power, 1.0, 1.0])
        assert (in_the_region(position).verdict == HOLDS) == inside


def test_the_exponent_of_bam_may_leave_the_region_and_its_eigenvalues_show_it():
    scale = [math.log(0.1)] * HEADS
    position = learned("bam", exponent=[1.0, 2.5, 2.0, -0.5], log_scale=scale)
    finding = in_the_region(position)
    assert finding.verdict == FACT
    assert finding.detail == "exponent of head 1 is 2.5; exponent of head 3 is -0.5"
    assert within_bounds(position).verdict == HOLDS
    kernel = definiteness(position)
    assert kernel.verdict == FACT
    assert kernel.detail.endswith("; heads that have one: 1, 3")
    broken = learned("ape_decay", root=[math.nan] * HEADS)
    assert definiteness(broken).verdict == FAILS


def test_layers_are_numbered_where_each_has_its_own():
    one = examine_learned([Placed(Subject("none").position(), (0, 1))])
    assert {finding.verdict for finding in one} == {NOT_APPLICABLE}
    two = examine_learned([Placed(Subject("bam").position(), (layer,)) for layer in range(2)])
    assert [finding.check[:9] for finding in two] == ["Layer 0: "] * 3 + ["Layer 1: "] * 3
