"""Bad results files, and places where results cannot be written."""

from tests.bad_inputs.case import Case

CASES: list[Case] = []
