"""Which block is in which window, whatever the protocol."""

import pytest

from megatron.results.pairing import blocks_of_windows, over_text
from tests.results.paired_rows import row, texts


def measured(length, windows, blocks, **more):
    """A row of some windows and blocks, with the tokens that it scored."""
    tokens = more.pop("tokens", windows * length)
    losses = [3.0] * blocks
    return row("a", texts(windows), length=length, tokens=tokens, block_losses=losses, **more)


@pytest.mark.parametrize(
    ("one", "sizes"),
    [
        (measured(16384, 8, 256), [32] * 8),
        (measured(512, 256, 256), [1] * 256),
        (measured(256, 8, 4), [1] * 4),  # a block spans two windows
        (measured(768, 4, 6), [2, 1, 2, 1]),  # blocks cross the ends of windows
        (measured(1000, 2, 4, block_tokens=[512, 488] * 2), [2, 2]),
        (measured(2048, 3, 3, tokens=3 * 256, block_tokens=[256] * 3), [1, 1, 1]),  # tail
        (measured(2048, 3, 8, tokens=4096, window_tokens=[2048, 1024, 1024]), [4, 2, 2]),  # sliding
    ],
)
def test_blocks_belong_to_the_window_in_which_they_begin(one, sizes):
    assert blocks_of_windows(one) == sizes


def test_a_block_weighs_as_much_as_its_targets():
    tokens = [512, 488] * 2
    ours = measured(1000, 2, 4, block_tokens=tokens) | {"block_losses": [4.0, 3.0, 4.0, 3.0]}
    theirs = measured(1000, 2, 4, block_tokens=tokens)
    paired = over_text([ours], [theirs])
    assert paired.estimate.mean == pytest.approx(512 / 1000)
    assert (paired.unit, paired.tokens, paired.windows) == ("blocks", 500, 2)
