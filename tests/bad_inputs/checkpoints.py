"""Damaged, foreign and missing checkpoints."""

from tests.bad_inputs.case import Case

CASES: list[Case] = []
