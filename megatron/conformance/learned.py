"""What training has made of an encoding: where its numbers went, and the kernel that they give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.conformance.finding import FACT, Finding, fails, holds, not_applicable
from megatron.conformance.kernels import CLAIM, SIZES, definiteness, negative_heads
from megatron.positions import Position
from megatron.positions.layers import Placed

EVERYWHERE = (-math.inf, math.inf)
SHOWN = 4  # numbers that a finding names

BOUNDS = "Learned numbers are within their bounds"
REGION = "Learned numbers are in the kernel's region"
KERNEL = "The bias is conditionally positive definite"


class Outside(NamedTuple):
    """A number outside of an interval: whose it is, as it is stored, and as it acts."""

    name: str
    stored: float
    acts: float

    def __str__(self) -> str:
        if self.stored == self.acts:
            return f"{self.name} is {self.acts:.4g}"
        return f"{self.name} is stored as {self.stored:.4g} and acts as {self.acts:.4g}"


def examine_learned(positions: Sequence[Placed]) -> list[Finding]:
    """Findings for the encodings of a trained model."""
    findings = []
    for placed in positions:
        label = placed.label[0].upper() + placed.label[1:]
        where = f"{label}: " if len(positions) > 1 else ""
        for finding in _of_one(placed.position):
            findings.append(replace(finding, check=where + finding.check))
    return findings


def _of_one(position: Position) -> list[Finding]:
    return [
        replace(within_bounds(position), check=BOUNDS),
        replace(in_the_region(position), check=REGION),
        replace(learned_definiteness(position), check=KERNEL),
    ]


def within_bounds(position: Position) -> Finding:
    """Numbers that are stored outside of their bounds act as the nearest ones within them."""
    bounds = {name: interval(position, name, "bounds") for name in position.learned()}
    bounds = {name: one for name, one in bounds.items() if one != EVERYWHERE}
    if not bounds:
        return not_applicable("nothing that it learns has bounds")
    return _all_inside(position, bounds)


def in_the_region(position: Position) -> Finding:
    """Numbers that left the region still act within their bounds: the eigenvalues are of these."""
    regions = {name: region_of(position, name) for name in position.learned()}
    known = {name: region for name, region in regions.items() if region is not None}
    if not known:
        return not_applicable("no region is known for what it learns")
    return _all_inside(position, known)


def _all_inside(position: Position, intervals: Mapping[str, tuple[float, float]]) -> Finding:
    found: list[Outside] = []
    for name, within in intervals.items():
        found += outside(position, name, within)
    if not found:
        return holds()
    words = "; ".join(map(str, found[:SHOWN]))
    more = len(found) - SHOWN
    if more > 0:
        words += f"; and {more} more"
    return Finding(FACT, words)


@torch.no_grad()
def learned_definiteness(position: Position) -> Finding:
    """The finding of `definiteness`, with all heads that have not the property."""
    bias = position.distance_bias(SIZES[-1])
    if bias is not None and not bias.isfinite().all():
        return fails("the bias is not finite")
    finding = definiteness(position)
    heads = negative_heads(position)
    if len(heads) > 1:
        numbers = ", ".join(map(str, heads))
        finding = replace(finding, detail=f"{finding.detail}; heads that have one: {numbers}")
    return finding


def region_of(position: Position, name: str) -> tuple[float, float] | None:
    """The interval of a learned parameter in which its bias has the property; None if unknown.

    An encoding that claims the property has it for all of its bounds. Theorems such as KERPLE's
    say > 0 where bounds have a small floor.
    """
    owner = position.get_submodule(name.rpartition(".")[0])
    if name.rpartition(".")[2] in getattr(owner, "definite_within", {}):
        return interval(position, name, "definite_within")
    if CLAIM in getattr(owner, "claims", ()):
        low, high = interval(position, name, "bounds")
        return min(low, 0.0), high
    return None


def interval(position: Position, name: str, of: str) -> tuple[float, float]:
    """The interval of a parameter by its path, from `bounds` or `definite_within` of its owner."""
    owner, _, last = name.rpartition(".")
    return getattr(position.get_submodule(owner), of, {}).get(last, EVERYWHERE)


def outside(position: Position, name: str, within: tuple[float, float]) -> list[Outside]:
    """The entries of a parameter that are stored outside of an interval."""
    low, high = within
    stored = position.get_parameter(name).detach().float()
    acting = position.learned()[name]
    places = ((stored < low) | (stored > high) | stored.isnan()).nonzero()
    return [
        Outside(_entry(position, name, place), *_values(stored, acting, place)) for place in places
    ]


def _values(stored: Tensor, acting: Tensor, place: Tensor) -> tuple[float, float]:
    at = tuple(place.tolist())
    return stored[at].item(), acting[at].item()


def _entry(position: Position, name: str, place: Tensor) -> str:
    """`p of head 3`, or `weight_logits[0, 3]` for a number that is not one per head."""
    shape = position.get_parameter(name).shape
    if list(shape) == [position.shape.heads]:
        return f"{name} of head {place.item()}"
    return f"{name}{place.tolist()}"
