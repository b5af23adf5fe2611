"""Each check passes what is right and finds the planted mistake that it is about."""

from itertools import count
from typing import ClassVar

import pytest
import torch
from torch import nn

from megatron.conformance import gradients, model, precision, tables
from megatron.conformance.checks import CHECKS, examine, title
from megatron.conformance.finding import (
    FACT,
    FAILS,
    HOLDS,
    NOT_APPLICABLE,
    Check,
    largest_difference,
    largest_difference_in,
)
from megatron.conformance.subject import Subject
from megatron.errors import UserError
from megatron.positions import DistanceBias, Position, register
from megatron.positions.rotary import Rotary

pytestmark = pytest.mark.usefixtures("own_registry")

SLOW = (
    model.finite_losses,
    model.later_tokens_change_nothing,
    gradients.training_stays_finite,
)
QUICK = [check for check in CHECKS if check not in SLOW]


def failing(encoding: type[Position], *slow_checks: Check) -> set[Check]:
    """The checks that fail for a planted encoding, slow ones only if named."""
    register("planted")(encoding)
    checks = [*QUICK, *slow_checks]
    findings = examine(Subject("planted"), checks)
    return {
        check for check, finding in zip(checks, findings, strict=True) if finding.verdict == FAILS
    }


def details(name: str, check: Check, **options) -> tuple[str, str]:
    (finding,) = examine(Subject(name, options), [check])
    return finding.verdict, finding.detail


def test_every_check_has_a_sentence_of_its_own():
    titles = [title(check) for check in CHECKS]
    assert len(set(titles)) == len(titles)
    assert all(20 < len(text) < 70 for text in titles)


def test_a_finding_carries_the_sentence_of_its_check():
    (finding,) = examine(Subject("alibi"), [tables.never_rises])
    assert finding.check == "The bias never rises with distance"
    assert finding.verdict == HOLDS
    assert finding.detail == "on 0 to 16383"


@pytest.mark.parametrize(
    ("name", "check", "verdict", "detail"),
    [
        ("learned", tables.shift_invariant, FACT, "it adds something to the embedding"),
        ("cable", tables.shift_invariant, FACT, "it looks at content"),
        ("fire", tables.shift_invariant, FACT, "relative difference"),
        ("t5", tables.never_rises, FACT, "rises by"),
        ("learned", tables.zero_at_zero, NOT_APPLICABLE, "it has no bias by distance"),
        ("rotary", tables.same_at_every_length, NOT_APPLICABLE, "it has no table by distance"),
        ("rotary", tables.alone_in_a_mixture, NOT_APPLICABLE, "it is not a function of the"),
        ("rotary", precision.float32_under_autocast, NOT_APPLICABLE, "it has no bias"),
        ("alibi", gradients.bounds_hold_anywhere, NOT_APPLICABLE, "it learns nothing"),
        ("cope", model.backends_agree, NOT_APPLICABLE, "scores that look at content exist in"),
        ("learned", tables.finite_far_away, NOT_APPLICABLE, "refused: pos_emb: learned positions"),
        ("learned", gradients.gradients_finite_far_away, HOLDS, "at 64, where it ends"),
        ("xpos", tables.finite_far_away, HOLDS, "at 16384; at 131072 refused: pos_emb: xpos"),
    ],
)
def test_what_does_not_hold_or_apply_says_why(name, check, verdict, detail):
    found_verdict, found_detail = details(name, check)
    assert found_verdict == verdict
    assert detail in found_detail


def test_one_number_per_head_is_tried_with_that_many_heads_only():
    verdict, detail = details("alibi", tables.right_shape, slopes=[0.5, 0.25, 0.1, 0.05])
    assert verdict == HOLDS
    assert detail.startswith("bias; not with 32 heads: pos_emb_args: alibi: slopes: 4 numbers")


def test_a_wrong_name_or_option_stops_before_the_checks():
    with pytest.raises(UserError, match="no encoding is called 'rotery'"):
        examine(Subject("rotery"))
    with pytest.raises(UserError, match="alibi takes no option 'slope'"):
        examine(Subject("alibi", {"slope": 1}))


def test_a_difference_is_infinite_for_nan_and_refuses_other_shapes_and_names():
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert largest_difference(one, 3 * one) == 2.0
    assert largest_difference(one, nan) == float("inf")
    assert largest_difference_in({}, {}) == 0.0
    with pytest.raises(ValueError, match=r"\[3\] and \[1\] cannot be compared"):
        largest_difference(one, one[:1])
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] cannot be compared"):
        largest_difference_in({"a": one}, {"b": one})


class OneNumber(DistanceBias):
    """A slope per head."""

    def __init__(self, shape):
        super().__init__(shape)
        self.slope = nn.Parameter(torch.rand(shape.heads))

    def log_kernel(self, distance):
        return -self.bounded("slope")[:, None] * distance


def test_a_plain_encoding_of_a_user_passes():
    assert failing(OneNumber) == set()


def test_a_kernel_that_depends_on_the_length_is_found():
    class Normalised(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance / len(distance))

    found = failing(Normalised, model.later_tokens_change_nothing)
    assert {tables.same_at_every_length, model.later_tokens_change_nothing} <= found


def test_a_logarithm_of_zero_is_found():
    class Logarithm(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance.log())

    found = failing(Logarithm, model.finite_losses)
    assert {tables.finite_far_away, gradients.gradients_finite_far_away} <= found
    assert {model.finite_losses, gradients.gradients_reach_every_parameter} <= found


@pytest.mark.parametrize("heads", [1, 3])
def test_a_table_of_another_shape_is_found(heads):
    class Shared(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance)[:heads]

    assert tables.right_shape in failing(Shared)


def test_a_broken_claim_fails_and_no_claim_is_a_fact():
    class Rising(OneNumber):
        claims = ("never_rises", "zero_at_0")

        def log_kernel(self, distance):
            return 1 - super().log_kernel(distance)

    assert failing(Rising) == {tables.zero_at_zero, tables.never_rises}
    Rising.claims = ()
    assert details("planted", tables.never_rises)[0] == FACT


def test_a_number_that_the_cast_rounds_is_found():
    class Rounded(OneNumber):
        def _apply(self, fn, recurse=True):
            return nn.Module._apply(self, fn, recurse)  # as if float32 were not kept

    assert precision.float32_after_cast in failing(Rounded)


def test_content_that_the_cast_rounds_is_found():
    class Rounded(Position):
        """x w between key and query."""

        def __init__(self, shape):
            super().__init__(shape)
            self.w = nn.Parameter(torch.randn(shape.hidden, shape.heads))

        def _apply(self, fn, recurse=True):
            return nn.Module._apply(self, fn, recurse)

        def on_scores(self, scores, x, memory):
            return scores + (x.float() @ self.w.float()).transpose(1, 2)[..., None]

    assert precision.float32_after_cast in failing(Rounded)


def test_a_bias_that_autocast_rounds_is_found():
    class Product(OneNumber):
        def distance_bias(self, length):
            return -(self.slope[:, None] @ self.distances(length)[None])

    assert precision.float32_under_autocast in failing(Product)


def test_a_parameter_without_a_gradient_is_found():
    class Detached(OneNumber):
        def log_kernel(self, distance):
            return -self.slope.detach()[:, None] * distance

    assert failing(Detached) == {
        gradients.gradients_match_finite_differences,
        gradients.gradients_finite_far_away,
        gradients.gradients_reach_every_parameter,
    }
    _, detail = details("planted", gradients.gradients_finite_far_away)
    assert detail == "nothing that it learns has an effect"


def test_a_parameter_whose_gradient_is_zero_is_found():
    class Saturated(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance) * 0

    assert failing(Saturated) == {gradients.gradients_reach_every_parameter}
    _, detail = details("planted", gradients.gradients_reach_every_parameter)
    assert detail == "the gradient of positions.0.slope is 0 in eager at 64 tokens"


def test_a_wrong_gradient_is_found():
    class Clamped(OneNumber):
        def log_kernel(self, distance):
            slope = self.slope + (self.slope**2 - self.slope).detach()
            return -slope[:, None] * distance

    assert failing(Clamped) == {gradients.gradients_match_finite_differences}


def test_a_number_that_runs_out_of_its_domain_is_found():
    class Root(OneNumber):
        def log_kernel(self, distance):
            return -(0.01 * (self.slope[:, None] - 0.9) * (distance - 3)).sqrt()

    found = failing(Root, gradients.training_stays_finite)
    assert {gradients.bounds_hold_anywhere, gradients.training_stays_finite} <= found


def test_bounds_that_nothing_keeps_are_found():
    class Unbounded(OneNumber):
        bounds: ClassVar = {"slope": (0.0, 1.0)}

        def learned(self):
            return {"slope": self.slope.detach()}

    assert gradients.bounds_hold_anywhere in failing(Unbounded)
    _, detail = details("planted", gradients.bounds_hold_anywhere)
    assert detail == "slope is -5 where -5 is stored in float32"


def test_a_tensor_that_is_saved_for_nothing_is_found():
    class Cached(OneNumber):
        def __init__(self, shape):
            super().__init__(shape)
            self.register_buffer("table_of_512", torch.zeros(512))

    assert failing(Cached) == {precision.survives_saving}


def test_a_rotation_that_forgets_where_a_piece_of_text_starts_is_found():
    class Forgetful(Rotary):
        def on_queries_keys(self, q, k, start=0):
            return super().on_queries_keys(q, k, 0)

    assert failing(Forgetful) == {model.cached_is_full}


def test_a_bias_that_changes_from_call_to_call_is_found():
    class Fickle(OneNumber):
        """Another slope at every second call."""

        def log_kernel(self, distance):
            return super().log_kernel(distance) * (1 + next(calls) % 2)

    calls = count()

    assert model.backends_agree in failing(Fickle)
