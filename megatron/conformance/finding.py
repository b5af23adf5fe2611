"""The result of one check: a verdict, and the numbers or the reason behind it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.conformance.subject import Subject

HOLDS, FAILS, FACT, NOT_APPLICABLE = "ok", "FAIL", "no", "n/a"


@dataclass(frozen=True)
class Finding:
    """What a check has found out.

    verdict: HOLDS, FAILS, FACT (it does not hold, and need not) or NOT_APPLICABLE
    detail: the numbers, or the reason
    check: the sentence that was checked
    """

    verdict: str
    detail: str = ""
    check: str = ""


Check = Callable[[Subject], Finding]


def holds(detail: str = "") -> Finding:
    return Finding(HOLDS, detail)


def fails(detail: str) -> Finding:
    return Finding(FAILS, detail)


def not_applicable(reason: str) -> Finding:
    return Finding(NOT_APPLICABLE, reason)


def at_most(allowed: float, worst: float, measured: str = "largest difference") -> Finding:
    """Holds if the worst number is within what is allowed."""
    if worst <= allowed:
        return holds(f"{measured} {worst:.1e}")
    return fails(f"{measured} {worst:.1e}, allowed {allowed:g}")


def largest_difference(first: Tensor, second: Tensor) -> float:
    """The largest |first - second|, infinite for nan; ValueError if shapes differ."""
    if first.shape != second.shape:
        raise ValueError(f"{list(first.shape)} and {list(second.shape)} cannot be compared")
    difference = first.detach().double() - second.detach().double()
    if not difference.numel():
        return 0.0
    return float(difference.abs().nan_to_num(math.inf).max())


def largest_difference_in(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The same over tensors of the same names; ValueError if one side lacks a name."""
    if first.keys() != second.keys():
        raise ValueError(f"{list(first)} and {list(second)} cannot be compared")
    return max((largest_difference(first[name], second[name]) for name in first), default=0.0)
