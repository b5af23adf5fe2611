"""Training that cannot start: folders, logging, signals and the optimizer."""

from tests.bad_inputs.case import Case

CASES: list[Case] = []
