"""Whether a bias is one of the kernels that KERPLE and MEP rest on, as first drawn and as learned.

KERPLE (arXiv 2205.09921) takes biases k(i - j) that are conditionally positive definite: Σ_ij c_i
c_j k(i - j) ≥ 0 for all c whose sum is 0. Then k plus a large enough constant is positive definite,
and softmax does not see the constant. MEP (arXiv 2403.17698) takes positive definite kernels
exp(bias) and their means. That is the weaker property: a bias is conditionally positive definite if
and only if exp(t · bias) is positive definite for all t > 0 (Schoenberg).

A matrix of a few hundred tokens can refute a property. It cannot prove it for longer texts.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.conformance.subject import FACT, FAILS, HOLDS, NOT_APPLICABLE, Finding, Subject
from megatron.positions import Position
from megatron.positions.layers import Placed

SIZES = (32, 256)  # tokens
ROUNDING = 1e-11  # of the largest entry, for each token
CLAIM = "conditionally_positive_definite"
"""What an encoding claims that must have this property: see Position.claims."""
EVERYWHERE = (-math.inf, math.inf)
SHOWN = 4  # numbers that a finding names


class Eigenvalue(NamedTuple):
    """The smallest one of a head's matrix of so many tokens, relative to its largest entry."""

    value: float
    head: int
    tokens: int

    @property
    def is_negative(self) -> bool:
        """Whether it is below 0 by more than rounding explains."""
        return self.value < -ROUNDING * self.tokens


def conditionally_positive_definite(subject: Subject) -> Finding:
    """The bias is a conditionally positive definite kernel of the distance.

    No fault in an encoding that does not claim it: only KERPLE rests on it.
    """
    return definiteness(subject.position())


@torch.no_grad()
def definiteness(position: Position) -> Finding:
    """The finding for an encoding with the values that it has now, such as learned ones."""
    bias = copy.deepcopy(position).double().distance_bias(SIZES[-1])
    if bias is None:
        return Finding(NOT_APPLICABLE, "it has no bias by distance")
    if not bias.isfinite().all():
        return Finding(FAILS, "the bias is not finite")
    found = smallest_eigenvalues(bias, sum_is_zero=True)
    heads = sorted({one.head for one in found if one.is_negative})
    if not heads:
        return Finding(HOLDS, f"on {' and '.join(map(str, SIZES))} tokens")
    worst = worst_of(found)
    detail = f"head {worst.head} has the eigenvalue {worst.value:.1e} on {worst.tokens} tokens"
    if not worst_of(smallest_eigenvalues(bias.exp())).is_negative:
        detail += "; exp(bias) is positive definite, as MEP's kernels are"
    if len(heads) > 1:
        detail += f"; heads that have one: {', '.join(map(str, heads))}"
    return Finding(FAILS if CLAIM in position.claims else FACT, detail)


def worst_of(found: Sequence[Eigenvalue]) -> Eigenvalue:
    """The one that is farthest below 0."""
    return min(found, key=lambda one: one.value / one.tokens)


def smallest_eigenvalues(kernel: Tensor, *, sum_is_zero: bool = False) -> list[Eigenvalue]:
    """The smallest eigenvalue of the matrices kernel[|i - j|] for each head and each of SIZES.

    kernel [heads, at least the largest size] float64;
    sum_is_zero: only for vectors whose sum is 0
    """
    found = []
    for tokens in SIZES:
        index = torch.arange(tokens)
        matrices = kernel[:, (index[:, None] - index).abs()]  # [heads, tokens, tokens]
        scale = matrices.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(matrices.dtype).tiny)
        if sum_is_zero:
            matrices = matrices - matrices.mean(dim=1, keepdim=True)
            matrices = matrices - matrices.mean(dim=2, keepdim=True)
        smallest = torch.linalg.eigvalsh(matrices)[:, 0] / scale
        for head, value in enumerate(smallest.tolist()):
            found.append(Eigenvalue(value, head, tokens))
    return found


def examine_learned(positions: Sequence[Placed]) -> list[Finding]:
    """Findings for the encodings of a trained model."""
    findings = []
    for placed in positions:
        label = placed.label[0].upper() + placed.label[1:]
        where = f"{label}: " if len(positions) > 1 else ""
        of_one = {
            "Learned numbers are within their bounds": within_bounds(placed.position),
            "Learned numbers are in the kernel's region": in_the_region(placed.position),
            "The bias is conditionally positive definite": definiteness(placed.position),
        }
        findings += [replace(finding, check=where + check) for check, finding in of_one.items()]
    return findings


def within_bounds(position: Position) -> Finding:
    """Numbers that are stored outside of their bounds act as the nearest ones within them."""
    bounds = {name: interval(position, name, "bounds") for name in position.learned()}
    bounds = {name: one for name, one in bounds.items() if one != EVERYWHERE}
    if not bounds:
        return Finding(NOT_APPLICABLE, "nothing that it learns has bounds")
    return _all_inside(position, bounds)


def in_the_region(position: Position) -> Finding:
    """Numbers that left the region still act within their bounds: the eigenvalues are of these.

    An encoding that claims the property has it for all of its bounds. Theorems such as KERPLE's
    say > 0 where bounds have a small floor.
    """
    regions = {}
    for name in position.learned():
        owner = position.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] in getattr(owner, "definite_within", {}):
            regions[name] = interval(position, name, "definite_within")
        elif CLAIM in getattr(owner, "claims", ()):
            low, high = interval(position, name, "bounds")
            regions[name] = (min(low, 0.0), high)
    if not regions:
        return Finding(NOT_APPLICABLE, "no region is known for what it learns")
    return _all_inside(position, regions)


def interval(position: Position, name: str, of: str) -> tuple[float, float]:
    """The interval of a parameter by its path, from `bounds` or `definite_within` of its owner."""
    owner, _, last = name.rpartition(".")
    return getattr(position.get_submodule(owner), of, {}).get(last, EVERYWHERE)


def _all_inside(position: Position, intervals: Mapping[str, tuple[float, float]]) -> Finding:
    """Which numbers are stored outside of these intervals, and as what they act."""
    found = []
    for name, (low, high) in intervals.items():
        stored = position.get_parameter(name).detach().float()
        acting = position.learned()[name]
        for place in ((stored < low) | (stored > high) | stored.isnan()).nonzero().tolist():
            entry = f"{name}{place}"
            if list(stored.shape) == [position.shape.heads]:
                entry = f"{name} of head {place[0]}"
            kept, acts = stored[tuple(place)].item(), acting[tuple(place)].item()
            acted = f" is stored as {kept:.4g} and acts as {acts:.4g}"
            found.append(entry + (f" is {acts:.4g}" if kept == acts else acted))
    if not found:
        return Finding(HOLDS)
    words = "; ".join(found[:SHOWN])
    more = len(found) - SHOWN
    if more > 0:
        words += f"; and {more} more"
    return Finding(FACT, words)
