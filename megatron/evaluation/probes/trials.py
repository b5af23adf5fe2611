"""What a task asks: contexts with questions, made of the tokens of a held-out text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

NO_TOKEN = -1  # fills up a line of targets that has fewer right answers than another


@dataclass(frozen=True)
class Trial:
    """One context with the answers, and the same with other answers.

    ids: [2, length]
    at: [count] positions of the questions: targets[i] must be predicted at position at[i]
    targets: [count] the answers of the first context; or [count, choices], where any of a line is
        right, and NO_TOKEN stands for none
    cell: [count] the number of the place (the depth, or the axis of its task) of each answer
    guess: [count] accuracy of drawing among what the context offers; None: nothing is offered
    """

    ids: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    cell: np.ndarray
    guess: np.ndarray | None = None


Trials = Callable[[np.random.Generator, np.ndarray, int, Sequence[float]], Iterator[Trial]]
"""(random, text, length, places) -> contexts of `length` tokens, which ask about every place."""


@dataclass(frozen=True)
class Task:
    """A kind of question.

    trials: makes the contexts of one trial
    places: what rows are about, such as numbers of hops; None: the depths that the caller asks for
    form: the sizes that define the task; every row has them
    """

    trials: Trials
    places: Sequence[float] | None = None
    form: Mapping[str, int] = field(default_factory=dict)


def words_of(text: np.ndarray) -> np.ndarray:
    """The tokens that questions and answers are drawn from: each token of the text once."""
    return np.unique(text)


def filler_of(random: np.random.Generator, text: np.ndarray, length: int) -> np.ndarray:
    """A random piece of the text: [length]."""
    start = int(random.integers(0, len(text) - length + 1))
    return text[start : start + length].copy()


def replace_tokens(
    random: np.random.Generator, filler: np.ndarray, tokens: np.ndarray, others: np.ndarray
) -> None:
    """Put random ones of `others` where the filler has one of `tokens`, in place."""
    is_one = np.isin(filler, tokens)
    filler[is_one] = random.choice(others, is_one.sum())


def inserted(filler: np.ndarray, pieces: np.ndarray, spots: np.ndarray) -> np.ndarray:
    """The filler with pieces between its tokens.

    filler [n], pieces [count, size], spots [count]: tokens of filler before each piece, ascending
    -> [n + count * size]
    """
    count, size = pieces.shape
    starts = spots + size * np.arange(count)
    places = starts[:, None] + np.arange(size)  # [count, size]
    ids = np.empty(len(filler) + pieces.size, dtype=filler.dtype)
    ids[places] = pieces
    is_filler = np.ones(len(ids), dtype=bool)
    is_filler[places] = False
    ids[is_filler] = filler
    return ids
