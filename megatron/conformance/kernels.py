"""Whether a bias is one of the kernels that KERPLE and MEP rest on, by eigenvalues.

KERPLE (arXiv 2205.09921) takes biases k(i - j) that are conditionally positive definite: Σ_ij c_i
c_j k(i - j) ≥ 0 for all c whose sum is 0. Then k plus a large enough constant is positive definite,
and softmax does not see the constant. MEP (arXiv 2403.17698) takes positive definite kernels
exp(bias) and their means. That is the weaker property: a bias is conditionally positive definite if
and only if exp(t · bias) is positive definite for all t > 0 (Schoenberg).

A matrix of a few hundred tokens can refute a property. It cannot prove it for longer texts.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.conformance.finding import FACT, FAILS, Finding, holds, not_applicable
from megatron.conformance.subject import Subject
from megatron.positions import Position

SIZES = (32, 256)  # tokens
ROUNDING = 1e-11  # of the largest entry, for each token
CLAIM = "conditionally_positive_definite"
"""What an encoding claims that must have this property: see Position.claims."""


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
        return not_applicable("it has no bias by distance")
    worst = smallest_eigenvalue(bias, sum_is_zero=True)
    if not worst.is_negative:
        return holds(f"on {' and '.join(map(str, SIZES))} tokens; {_with_a_constant(bias)}")
    detail = f"head {worst.head} has the eigenvalue {worst.value:.1e} on {worst.tokens} tokens"
    if not smallest_eigenvalue(bias.exp()).is_negative:
        detail += "; exp(bias) is positive definite, as MEP's kernels are"
    claimed = CLAIM in position.claims
    return Finding(FAILS if claimed else FACT, detail)


def _with_a_constant(bias: Tensor) -> str:
    """Which constant makes a conditionally positive definite bias positive definite, in words."""
    if not smallest_eigenvalue(bias).is_negative:
        return "positive definite as it is"
    shift = smallest_shift(bias)
    if math.isinf(shift):
        return "no constant makes it positive definite"
    return f"positive definite on {SIZES[-1]} with {shift:.3g} added"


@torch.no_grad()
def negative_heads(position: Position) -> list[int]:
    """The heads whose bias is not conditionally positive definite, as far as eigenvalues show."""
    bias = copy.deepcopy(position).double().distance_bias(SIZES[-1])
    if bias is None:
        return []
    found = smallest_eigenvalues(bias, sum_is_zero=True)
    return sorted({one.head for one in found if one.is_negative})


def smallest_eigenvalue(kernel: Tensor, *, sum_is_zero: bool = False) -> Eigenvalue:
    """The smallest one over heads and SIZES: see smallest_eigenvalues."""
    found = smallest_eigenvalues(kernel, sum_is_zero=sum_is_zero)
    return min(found, key=lambda one: one.value / one.tokens)


def smallest_eigenvalues(kernel: Tensor, *, sum_is_zero: bool = False) -> list[Eigenvalue]:
    """The smallest eigenvalue of the matrices kernel[|i - j|] for each head and each of SIZES.

    kernel [heads, at least the largest size] float64;
    sum_is_zero: only for vectors whose sum is 0
    """
    found = []
    for tokens in SIZES:
        matrices = toeplitz(kernel[:, :tokens])
        scale = matrices.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(matrices.dtype).tiny)
        if sum_is_zero:
            matrices = centred(matrices)
        smallest = torch.linalg.eigvalsh(matrices)[:, 0] / scale
        for head, value in enumerate(smallest.tolist()):
            found.append(Eigenvalue(value, head, tokens))
    return found


def toeplitz(kernel: Tensor) -> Tensor:
    """kernel[|i - j|]: [heads, tokens] -> [heads, tokens, tokens]."""
    index = torch.arange(kernel.shape[1], device=kernel.device)
    return kernel[:, (index[:, None] - index).abs()]


def centred(matrices: Tensor) -> Tensor:
    """P matrix P, P = 1 - 11ᵀ/tokens: what a matrix is for vectors whose sum is 0."""
    matrices = matrices - matrices.mean(dim=1, keepdim=True)
    return matrices - matrices.mean(dim=2, keepdim=True)


def smallest_shift(bias: Tensor) -> float:
    """The smallest c for which bias[|i - j|] + c is positive definite, for every head.

    bias [heads, tokens] float64, conditionally positive definite; infinite where there is none.
    With u = 1/√tokens · 1, M = P B P and b = P B u, the matrix is positive definite if and only if
    b is in the range of M and uᵀBu + c · tokens ≥ bᵀM⁺b (Schur complement).
    """
    tokens = bias.shape[1]
    matrices = toeplitz(bias)
    sums = matrices.sum(dim=2) / math.sqrt(tokens)  # B u
    along = sums.sum(dim=1) / math.sqrt(tokens)  # uᵀBu
    across = sums - sums.mean(dim=1, keepdim=True)  # b
    values, vectors = torch.linalg.eigh(centred(matrices))
    parts = (vectors.mT @ across[..., None])[..., 0]
    least = ROUNDING * tokens * matrices.abs().amax(dim=(1, 2))
    in_range = values > least[:, None]
    outside = (parts * ~in_range).norm(dim=1)
    if bool((outside > 1e-6 * across.norm(dim=1) + least).any()):
        return math.inf
    needed = (parts.square() / values.where(in_range, torch.ones_like(values)) * in_range).sum(1)
    return float(((needed - along) / tokens).max())
