"""The log of a training: what is read, left out and refused."""

import pytest

from megatron.results.log import training_log

GOOD = b'{"step": 1, "kind": "train", "loss": 3.5, "position": {"slopes": [1.0, 2.0]}}\n'


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + GOOD[:20])
    records = training_log(path)
    assert [(one["step"], one["loss"]) for one in records] == [(1, 3.5)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{\n", "line 2: it is no JSON"),
        (b"3\n", "line 2: it is no record of a step"),
        (b'{"step": 2, "loss": "x"}\n', "line 2: its loss is 'x', not a number or null"),
        (b'{"step": 2, "position": {"a": ["x"]}}\n', "line 2: its position is an object, not an"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + line)
    with pytest.raises(ValueError, match=message):
        training_log(path)
