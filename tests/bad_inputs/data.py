"""Bad text, token files and tokenizers."""

from tests.bad_inputs.case import Case

CASES: list[Case] = []
