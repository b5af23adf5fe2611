"""The parts of a corpus, and their shares in the key `split`."""

import math
import operator
from collections.abc import Iterable
from functools import reduce

from megatron.errors import UserError

PARTS = ("train", "valid", "test")
SPLIT = "949,50,1"  # GPT-NeoX's default
TASK_PREFIX = "task:"  # prefix of a task's name in data_path; a task holds out problems itself


def parse_split(split: str) -> tuple[float, float, float]:
    """The shares of train, valid and test; a missing share is 0. They need not sum to 1.

    Up to three numbers, separated by `,` or, as in GPT-NeoX, by `/`: "949,50,1", "90/10".
    Raises UserError for anything else.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < plain_sum(shares) < math.inf:
        raise UserError(
            f"split: {split!r} is not a list of shares for {', '.join(PARTS)}"
            " - write up to three numbers, such as 949,50,1"
        )
    train, valid, test = [*shares, 0.0, 0.0][:3]
    return train, valid, test


def plain_sum(numbers: Iterable[float]) -> float:
    """The sum of floats from left to right, for decisions that must never change.

    The built-in did the same up to Python 3.11. Since 3.12 it compensates rounding, and another
    last digit would select other windows.
    """
    return reduce(operator.add, numbers, 0)
