"""Checks of the biases: their shape, their course over distance, their values far away."""

from dataclasses import replace

import torch

from megatron.conformance.effects import (
    FAR,
    VERY_FAR,
    adds_to_embeddings,
    biases,
    effects_before,
    infinite_effect,
    scores,
    tables,
)
from megatron.conformance.finding import (
    FACT,
    FAILS,
    Finding,
    at_most,
    fails,
    holds,
    largest_difference,
    not_applicable,
)
from megatron.conformance.subject import Subject
from megatron.errors import UserError
from megatron.positions import DistanceBias

NO_TABLE = "it has no table by distance"
NO_BIAS = "it has no bias by distance"


def right_shape(subject: Subject) -> Finding:
    """Biases are [heads, length] float32 for 1 to 32 heads."""
    refusal = ""
    for heads in sorted({1, 3, 12, 16, 32, subject.heads}):
        try:
            position = replace(subject, heads=heads).position()
        except UserError as fault:  # its options hold one number per head
            refusal = f"; not with {heads} heads: {fault}"
            continue
        for name, bias in biases(position, 40).items():
            if tuple(bias.shape) != (heads, 40) or bias.dtype != torch.float32:
                return fails(f"{name} with {heads} heads is {list(bias.shape)} {bias.dtype}")
    names = list(biases(subject.position(), 8))
    if not names:
        return not_applicable("it has no bias")
    return holds(", ".join(names) + refusal)


def zero_at_zero(subject: Subject) -> Finding:
    """The bias is 0 at distance 0."""
    bias = tables(subject.position(), 1).get("bias")
    if bias is None:
        return not_applicable(NO_BIAS)
    largest = float(bias.detach().abs().max())
    detail = f"largest {largest:.1e}"
    if largest <= 1e-6:
        return holds(detail)
    return _unless_claimed(subject, "zero_at_0", detail)


def never_rises(subject: Subject) -> Finding:
    """The bias never rises with distance."""
    bias = tables(subject.position(), FAR).get("bias")
    if bias is None:
        return not_applicable(NO_BIAS)
    bias = bias.detach()
    rise = bias.diff().clamp(min=0)
    # float32 rounds neighbours of a large, slowly falling number in either direction
    rounding = 4 * torch.finfo(torch.float32).eps * bias[:, 1:].abs()
    rising = (rise > rounding).nonzero()
    if not len(rising):
        return holds(f"on 0 to {FAR - 1}")
    head, distance = rising[0].tolist()
    detail = f"head {head} rises by {rise[head, distance]:.1e} from distance {distance}"
    return _unless_claimed(subject, "never_rises", detail)


def _unless_claimed(subject: Subject, claim: str, detail: str) -> Finding:
    """A property that does not hold is a fault only in an encoding that claims it."""
    claimed = claim in subject.position().claims
    return Finding(FAILS if claimed else FACT, detail)


@torch.no_grad()
def shift_invariant(subject: Subject) -> Finding:
    """Scores depend on the distance alone."""
    position = subject.position()
    if position.looks_at_content:
        return Finding(FACT, "it looks at content")
    if adds_to_embeddings(position):
        return Finding(FACT, "it adds something to the embedding")
    if not position.by_distance:
        return Finding(FACT, "it says that it depends on the place in the text")
    position = position.double()
    torch.manual_seed(1)
    length, heads = 50, subject.heads
    one_q, one_k = torch.randn(2, 1, heads, 1, subject.head_dim, dtype=torch.float64)
    q = one_q.expand(-1, -1, length, -1)  # the same query at every position
    k = one_k.expand(-1, -1, length, -1)
    near = scores(position, q, k)
    far = scores(position, q, k, start=16000)
    moved = near[:, 1:, 1:].tril()  # one position further along the diagonals
    worst = max(
        largest_difference(near, far),
        largest_difference(moved, near[:, :-1, :-1]),
    )
    size = max(1.0, float(near.abs().max()))
    finding = at_most(1e-9, worst / size, "relative difference")
    if finding.verdict == FAILS and position.has("index_bias"):
        return replace(finding, verdict=FACT)
    return finding


@torch.no_grad()
def finite_far_away(subject: Subject) -> Finding:
    """Everything is finite at 16384 and at 131072 tokens."""
    position = subject.position()
    problem = infinite_effect(effects_before(position, FAR))
    if problem:
        return fails(f"{problem} at {FAR}")
    try:
        very_far = effects_before(position, VERY_FAR)
    except UserError as refusal:
        return holds(f"at {FAR}; at {VERY_FAR} refused: {refusal}")
    problem = infinite_effect(very_far)
    if problem:
        return fails(f"{problem} at {VERY_FAR}")
    return holds()


@torch.no_grad()
def same_at_every_length(subject: Subject) -> Finding:
    """A table is the same whatever length is asked for."""
    position = subject.position()
    longest = tables(position, FAR)
    if not longest:
        return not_applicable(NO_TABLE)
    worst = 0.0
    for length in (512, FAR, 64):  # one object, long and short lengths in turn
        for name, table in tables(position, length).items():
            worst = max(worst, largest_difference(table, longest[name][:, :length]))
    # The last numbers of an odd length are computed by scalar code, which rounds differently.
    for name, table in tables(position, 777).items():
        expected = longest[name][:, :777]
        worst = max(worst, largest_difference(table[:, :768], expected[:, :768]))
        if not torch.allclose(table, expected, rtol=1e-5, atol=0):
            return fails(f"{name} of length 777 differs from the beginning of a longer one")
    return at_most(0.0, worst)


@torch.no_grad()
def alone_in_a_mixture(subject: Subject) -> Finding:
    """A mixture of this kernel alone gives the same bias."""
    position = subject.position()
    if not isinstance(position, DistanceBias):
        return not_applicable("it is not a function of the distance alone")
    kernels = [{subject.name: subject.options}]
    mixture = replace(subject, name="mep", options={"kernels": kernels}).position()
    alone, mixed = tables(position, 512)["bias"], tables(mixture, 512)["bias"]
    return at_most(1e-5, largest_difference(alone, mixed))
