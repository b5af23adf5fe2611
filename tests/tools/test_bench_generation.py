"""The benchmark of generation: both sides choose the same tokens, and their ratio is in the row."""

import generation


def test_both_choose_the_same_tokens_and_have_a_row():
    size, batch, ours, theirs, ratio = generation.compared("2x64", batch=2, new=12, rounds=1)
    assert (size, batch) == ("2x64", "2")
    assert float(ours) > 0
    assert float(theirs) > 0
    assert float(ratio) > 0
