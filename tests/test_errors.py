"""The name that a misspelt one probably means."""

import pytest

from megatron.errors import closest, did_you_mean

NAMES = ["rotary", "alibi", "CharLevelTokenizer", "GPT2BPETokenizer"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("rotery", "rotary"),
        ("ROTARY", "rotary"),
        ("charlevel", "CharLevelTokenizer"),
        ("flux_capacitor", None),
        ("", None),
    ],
)
def test_the_closest_name_is_found_whatever_the_case(name, match):
    assert closest(name, NAMES) == match
    assert did_you_mean(name, iter(NAMES)) == (f"did you mean {match}?" if match else "")


def test_no_names_have_no_closest():
    assert closest("rotary", []) is None
