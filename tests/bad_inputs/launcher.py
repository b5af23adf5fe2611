"""Bad sweeps, words of deepy.py and environments of processes."""

from tests.bad_inputs.case import Case

CASES: list[Case] = []
