"""Each check passes what is right and finds the planted mistake that it is about."""

from itertools import count

import pytest
import torch
from torch import nn

from megatron.conformance import checks
from megatron.conformance.checks import CHECKS, SIZES, examine, smallest_eigenvalues, title
from megatron.conformance.subject import FACT, FAILS, HOLDS, NOT_APPLICABLE, Subject
from megatron.errors import UserError
from megatron.positions import REGISTRY, DistanceBias, Position, register
from megatron.positions.fox import Fox
from megatron.positions.rotary import Rotary

pytestmark = pytest.mark.usefixtures("own_registry")
SLOW = (checks.later_tokens_change_nothing,)


def failing(encoding: type[Position], *slow_checks) -> set:
    """The checks that fail for a planted encoding, slow ones only if named."""
    name = encoding.__name__.lower()
    register(name)(encoding)
    chosen = [check for check in CHECKS if check not in SLOW or check in slow_checks]
    findings = examine(Subject(name), chosen)
    failed = {finding.check for finding in findings if finding.verdict == FAILS}
    return {check for check in chosen if title(check) in failed}


def test_what_does_not_hold_or_apply_says_why():
    positive = checks.conditionally_positive_definite
    for name, check, verdict, detail in (
        ("alibi", checks.never_rises, HOLDS, "on 0 to 16383"),
        ("learned", checks.shift_invariant, FACT, "it adds something to the embedding"),
        ("cable", checks.shift_invariant, FACT, "it looks at content"),
        ("fire", checks.shift_invariant, FACT, "relative difference"),
        ("t5", checks.never_rises, FACT, "rises by"),
        ("learned", checks.zero_at_zero, NOT_APPLICABLE, "it has no bias by distance"),
        ("alibi", checks.bounds_hold_anywhere, NOT_APPLICABLE, "it learns nothing"),
        ("learned", checks.finite_far_away, NOT_APPLICABLE, "refused: pos_emb: learned positions"),
        ("cope", checks.finite_far_away, NOT_APPLICABLE, "which was computed on 32 tokens alone"),
        ("xpos", checks.finite_far_away, HOLDS, "at 16384; at 131072 refused: pos_emb: xpos"),
        ("alibi", positive, HOLDS, "on 32 and 256 tokens"),
        ("mep_param", positive, FACT, "; exp(bias) is positive definite, as MEP's kernels are"),
    ):
        (finding,) = examine(Subject(name), [check])
        assert finding.verdict == verdict, (name, finding)
        assert detail in finding.detail
        assert finding.check == title(check)
    with pytest.raises(UserError, match="no encoding is called 'rotery'"):
        Subject("rotery").position()


D = torch.arange(SIZES[-1], dtype=torch.float64)
# Schoenberg: -d^p is conditionally positive definite for 0 < p <= 2 and for no other p.
CONDITIONALLY = {
    "-d^0.5": -D.sqrt(),
    "-d^2": -D.square(),
    "-log(1 + d)": -D.log1p(),
    "cos": torch.cos(0.3 * D),
    "triangle": (1 - D / 20).clamp(min=0),
}
NOT_EVEN = {"-d^2.01": -(D**2.01), "+d": D, "box": (D < 5).double()}


def is_negative(kernel, **options) -> bool:
    return bool(smallest_eigenvalues(kernel[None], **options).any())


def test_known_kernels_and_counterexamples():
    for name, kernel in CONDITIONALLY.items():
        assert not is_negative(kernel, sum_is_zero=True), name
        for power in (0.01, 1, 3):  # then the powers of exp are positive definite
            assert not is_negative((power * kernel).exp()), name
        has_spectrum = name in ("cos", "triangle")
        assert is_negative(kernel) == (not has_spectrum), name
    for name, kernel in NOT_EVEN.items():
        assert is_negative(kernel, sum_is_zero=True), name


def test_claims_hold_for_other_first_values(monkeypatch):
    claim = "conditionally_positive_definite"
    claiming = {name for name, encoding in REGISTRY.items() if claim in encoding.claims}
    assert {"alibi", "kerple_log", "kerple_power", "kerple_log_3para"} <= claiming
    for name in claiming:
        for seed in range(3):
            bias = Subject(name).position(seed).double().distance_bias(SIZES[-1]).detach()
            assert not smallest_eigenvalues(bias, sum_is_zero=True).any(), name
    monkeypatch.setattr(REGISTRY["t5"], "claims", (claim,))
    assert checks.conditionally_positive_definite(Subject("t5")).verdict == FAILS


class Averaging(Fox):
    """A mean over the tokens up to each key, which says that it is a sum."""

    def score_bias(self, x, memory):
        u, w = super().score_bias(x, memory)
        return u, w / torch.arange(1, w.shape[-1] + 1)


class Looking(Fox):
    """A factor of the query that reads the first token of the text."""

    def score_bias(self, x, memory):
        _, w = super().score_bias(x, memory)
        return torch.ones_like(w) * x[:, :1, :1].double(), w


def test_what_says_that_it_sums_over_tokens_is_held_to_it():
    for name in ("fox", "cable"):
        assert checks.parts_sum_to_the_whole(Subject(name)).verdict == HOLDS
    both = Subject("sum", {"parts": ["rotary", "fox"]})
    assert checks.parts_sum_to_the_whole(both).verdict == HOLDS
    for encoding in (Averaging, Looking):
        register(encoding.__name__.lower())(encoding)
        finding = checks.parts_sum_to_the_whole(Subject(encoding.__name__.lower()))
        assert finding.verdict == FAILS, encoding
    assert checks.parts_sum_to_the_whole(Subject("alibi")).detail == "it has no score_bias"


class Growing(Rotary):
    """Keys and queries that grow along the text."""

    def on_queries_keys_at(self, q, k, query, key, **place):
        q, k = super().on_queries_keys_at(q, k, query, key, **place)
        return q, k * key[:, None]


def test_what_says_that_it_only_rotates_is_held_to_it():
    assert checks.shift_invariant(Subject("yarn", {"factor": 4})).verdict == HOLDS
    register("growing")(Growing)
    finding = checks.shift_invariant(Subject("growing"))
    assert finding.verdict == FAILS
    assert "norms change along the text" in finding.detail


class OneNumber(DistanceBias):
    """A slope per head."""

    def __init__(self, shape):
        super().__init__(shape)
        self.slope = nn.Parameter(torch.rand(shape.heads))

    def log_kernel(self, distance):
        return -self.bounded("slope")[:, None] * distance


class Normalised(OneNumber):
    def log_kernel(self, distance):
        return super().log_kernel(distance / len(distance))


class Logarithm(OneNumber):
    def log_kernel(self, distance):
        return super().log_kernel(distance.log())


class OfOneHead(OneNumber):
    def log_kernel(self, distance):
        return super().log_kernel(distance)[:1]


class Rising(OneNumber):
    claims = ("never_rises", "zero_at_0")

    def log_kernel(self, distance):
        return 1 - super().log_kernel(distance)


class Rounded(OneNumber):
    def _apply(self, fn, recurse=True):
        return nn.Module._apply(self, fn, recurse)  # as if float32 were not kept


class Product(OneNumber):
    def distance_bias(self, length):
        return -(self.slope[:, None] @ self.distances(length)[None])


class Detached(OneNumber):
    def log_kernel(self, distance):
        return -self.slope.detach()[:, None] * distance


class Saturated(OneNumber):
    def log_kernel(self, distance):
        return super().log_kernel(distance) * 0


class WrongGradient(OneNumber):
    def log_kernel(self, distance):
        slope = self.slope + (self.slope**2 - self.slope).detach()
        return -slope[:, None] * distance


class Unbounded(OneNumber):
    def bounded(self, name):
        return self.slope


class Random(OneNumber):
    """With numbers that are neither learned nor saved."""

    def __init__(self, shape):
        super().__init__(shape)
        self.register_buffer("factors", torch.rand(shape.heads, 1), persistent=False)

    def log_kernel(self, distance):
        return super().log_kernel(distance) * self.factors


class Forgetful(Rotary):
    def on_queries_keys(self, q, k, start=0):
        return super().on_queries_keys(q, k, 0)


class Fickle(OneNumber):
    """Another slope at every second call."""

    calls = count()

    def log_kernel(self, distance):
        return super().log_kernel(distance) * (1 + next(self.calls) % 2)


def test_a_plain_encoding_of_a_user_passes():
    assert failing(OneNumber) == set()


def test_planted_mistakes_are_found_by_their_checks_alone():
    for encoding, expected in (
        (Rising, {checks.zero_at_zero, checks.never_rises}),
        (WrongGradient, {checks.gradients_match_finite_differences}),
        (Saturated, {checks.gradients_reach_every_parameter}),
        (Random, {checks.survives_saving}),
        (Forgetful, {checks.cached_is_full}),
        (
            Detached,
            {
                checks.gradients_match_finite_differences,
                checks.gradients_reach_every_parameter,
            },
        ),
    ):
        assert failing(encoding) == expected, encoding
    Rising.claims = ()
    (finding,) = examine(Subject("rising"), [checks.never_rises])
    assert finding.verdict == FACT


def test_planted_mistakes_are_found_by_their_checks_too():
    for encoding, expected in (
        (OfOneHead, {checks.right_shape}),
        (Rounded, {checks.float32_in_half_precision}),
        (Product, {checks.float32_in_half_precision}),
        (Unbounded, {checks.bounds_hold_anywhere}),
        (Fickle, {checks.backends_agree}),
        (Normalised, {checks.later_tokens_change_nothing}),
        (Logarithm, {checks.finite_far_away}),
    ):
        assert expected <= failing(encoding, *expected), encoding
