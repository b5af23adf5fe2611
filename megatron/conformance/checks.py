"""All checks in their order, and how they are tried on one encoding."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.conformance.finding import Check, Finding, fails, not_applicable
from megatron.conformance.gradients import (
    bounds_hold_anywhere,
    gradients_finite_far_away,
    gradients_match_finite_differences,
    gradients_reach_every_parameter,
    training_stays_finite,
)
from megatron.conformance.kernels import conditionally_positive_definite
from megatron.conformance.model import (
    backends_agree,
    cached_is_full,
    finite_losses,
    later_tokens_change_nothing,
)
from megatron.conformance.precision import (
    float32_after_cast,
    float32_under_autocast,
    survives_saving,
)
from megatron.conformance.subject import Subject
from megatron.conformance.tables import (
    alone_in_a_mixture,
    finite_far_away,
    never_rises,
    right_shape,
    same_at_every_length,
    shift_invariant,
    zero_at_zero,
)
from megatron.errors import UserError

CHECKS: tuple[Check, ...] = (
    right_shape,
    shift_invariant,
    zero_at_zero,
    never_rises,
    conditionally_positive_definite,
    finite_far_away,
    same_at_every_length,
    alone_in_a_mixture,
    float32_after_cast,
    float32_under_autocast,
    survives_saving,
    later_tokens_change_nothing,
    cached_is_full,
    backends_agree,
    finite_losses,
    gradients_match_finite_differences,
    gradients_finite_far_away,
    gradients_reach_every_parameter,
    bounds_hold_anywhere,
    training_stays_finite,
)


def examine(subject: Subject, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Try the checks in order, and go on after one that fails or raises.

    UserError for a wrong name or option of the encoding.
    """
    subject.position()
    return [_try(check, subject) for check in checks]


def _try(check: Check, subject: Subject) -> Finding:
    try:
        finding = check(subject)
    except UserError as refusal:
        finding = not_applicable(f"refused: {refusal}")
    except Exception as fault:
        finding = fails(f"{type(fault).__name__}: {fault}")
    return replace(finding, check=title(check))


def title(check: Check) -> str:
    """The sentence that a check tries: the first line of its docstring."""
    first_line = (check.__doc__ or "").split("\n")[0]
    return first_line.rstrip(".")
