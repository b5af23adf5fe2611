"""Shares of a corpus, in GPT-NeoX's spellings."""

import pytest

from megatron.config import load
from megatron.errors import UserError
from megatron.splits import parse_split, plain_sum

SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]


def test_shares_are_up_to_three_numbers_and_anything_else_is_refused():
    shares = {
        "949,50,1": (949.0, 50.0, 1.0),
        "969/30/1": (969.0, 30.0, 1.0),
        " 8, 1, 1 ": (8.0, 1.0, 1.0),
        "0.9,0.1": (0.9, 0.1, 0.0),
        "1": (1.0, 0.0, 0.0),
    }
    for split, expected in shares.items():
        assert parse_split(split) == expected
    for split in ("", "a,b,c", "1,2,3,4", "0,0,0", "-1,2,1", "nan,1,1", "inf,1,1", "1;2"):
        with pytest.raises(UserError) as raised:
            parse_split(split)
        assert str(raised.value) == (
            f"split: {split!r} is not a list of shares for train, valid, test"
            " - write up to three numbers, such as 949,50,1"
        )


def test_floats_are_added_as_python_3_11_did():
    assert plain_sum([0.1] * 10) == 0.9999999999999999  # since 3.12 the built-in says 1.0
    assert plain_sum([1e16, 1.0, -1e16]) == 0.0
    assert plain_sum(number for number in (2, 3)) == 5


def test_every_spelling_of_a_split_is_one_setting():
    expected = load([], [*SHAPE, "split=90,9,1"]).hash
    for split in ("90/9/1", "[90,9,1]"):
        config = load([], [*SHAPE, f"split={split}"])
        assert config.data.split == "90,9,1"
        assert config.hash == expected
    assert load([], [*SHAPE, "split=1"]).data.split == "1"  # a number in YAML
