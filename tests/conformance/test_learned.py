"""Whether learned numbers left the region in which KERPLE's theorems hold, against known cases."""

import math

import pytest
import torch

from megatron.conformance.finding import FACT, FAILS, HOLDS, NOT_APPLICABLE
from megatron.conformance.learned import (
    examine_learned,
    in_the_region,
    learned_definiteness,
    within_bounds,
)
from megatron.conformance.subject import Subject
from megatron.positions import Position
from megatron.positions.layers import Placed
from tests.support import fill

HEADS = 4


def learned(name: str, *, options: dict | None = None, **values: list[float]) -> Position:
    position = Subject(name, options or {}).position()
    fill(position, {key: torch.tensor(value) for key, value in values.items()})
    return position


def test_first_values_are_inside():
    for name in ("kerple_log", "kerple_power", "kerple_log_3para", "bam", "ape_decay"):
        position = Subject(name).position()
        assert within_bounds(position).verdict == HOLDS
        assert in_the_region(position).verdict == HOLDS
        assert learned_definiteness(position).verdict == HOLDS


def test_bounds_are_exact_in_float32():
    """0.01 is 0.0099999998 in float32, and is not below itself."""
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
    assert learned_definiteness(position).verdict == HOLDS


@pytest.mark.parametrize(("power", "inside"), [(1.999, True), (2.0, True), (2.001, False)])
def test_schoenbergs_bound_on_the_power(power, inside):
    position = learned("kerple_power", a=[1.0] * HEADS, p=[1.0, power, 1.0, 1.0])
    assert (in_the_region(position).verdict == HOLDS) == inside


def test_the_exponent_of_bam_may_leave_the_region_and_its_eigenvalues_show_it():
    scale = [math.log(0.1)] * HEADS
    position = learned("bam", exponent=[1.0, 2.5, 2.0, -0.5], log_scale=scale)
    finding = in_the_region(position)
    assert finding.verdict == FACT
    assert finding.detail == "exponent of head 1 is 2.5; exponent of head 3 is -0.5"
    assert within_bounds(position).verdict == HOLDS
    kernel = learned_definiteness(position)
    assert kernel.verdict == FACT
    assert kernel.detail.endswith("; heads that have one: 1, 3")


def test_many_numbers_are_counted():
    position = learned("kerple_log", p=[-1.0] * HEADS, a=[-1.0] * HEADS)
    detail = in_the_region(position).detail
    assert detail.startswith("p of head 0 is stored as -1 and acts as 0.01; ")
    assert detail.endswith("; and 4 more")


def test_parts_of_a_sum_or_mixture_are_looked_at():
    position = Subject("sum", {"parts": ["rotary", "kerple_log"]}).position()
    fill(position, {"parts.1.p": torch.tensor([1.0, -1.0, 1.0, 1.0])})
    name = "parts.1.p of head 1 is stored as -1 and acts as 0.01"
    assert in_the_region(position).detail == name


def test_layers_are_numbered_where_each_has_its_own():
    one = examine_learned([Placed(Subject("none").position(), (0, 1))])
    assert {finding.verdict for finding in one} == {NOT_APPLICABLE}
    two = examine_learned([Placed(Subject("bam").position(), (layer,)) for layer in range(2)])
    assert [finding.check[:9] for finding in two] == ["Layer 0: "] * 3 + ["Layer 1: "] * 3


def test_a_bias_that_is_not_a_number_fails():
    position = learned("ape_decay", root=[math.nan] * HEADS)
    assert learned_definiteness(position).verdict == FAILS
    assert "root of head 0 is nan" in within_bounds(position).detail.replace("stored as ", "")
