"""Lists of words that are told apart by how often they occur: RULER's two tasks of aggregation.

A list has a fixed number of different words, whatever its length. So the guess rate hardly depends
on the length, and longer lists differ in nothing but their counts.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron.errors import UserError
from megatron.evaluation.probes.trials import NO_TOKEN, Task, Trial, words_of

COMMON = 4  # words that occur more often than the others
TIMES = 4  # as often
UNCOMMON = 32
RANKED = 16  # words of a list whose counts fall as 1 / rank
TOP = 3  # of them, which are asked for
COMMON_WEIGHTS = np.repeat([float(TIMES), 1.0], [COMMON, UNCOMMON])
RANKED_WEIGHTS = 1 / np.arange(1, RANKED + 1)
COMMON_EXAMPLE = COMMON * TIMES + UNCOMMON  # tokens of the example's list
RANKED_EXAMPLE = 2 * RANKED


def common_words(
    random: np.random.Generator, text: np.ndarray, length: int, places: Sequence[float]
) -> Iterator[Trial]:
    """A list of words; at its end the words that occur most often, in any order.

    Before it stands a short list with its answer. It has other common words and the same uncommon
    ones. A target is any common word that was not named before.
    places: 0, 1, … common words were named before
    UserError where the text has too few different tokens, or the length is too short.
    """
    total = length - COMMON_EXAMPLE - 2 * (COMMON + 1) + 1  # tokens of the list
    needed = 2 * COMMON + UNCOMMON + 1
    names = _names(random, text, needed, "common_words", length, 2 * COMMON_EXAMPLE - total)
    common, example_answer, uncommon, mark = np.split(names, np.cumsum([COMMON, COMMON, UNCOMMON]))
    words = np.concatenate([common, uncommon])
    # Four uncommon words and the common ones change places.
    other_words = np.concatenate([uncommon[:COMMON], common, uncommon[COMMON:]])
    example_words = np.concatenate([example_answer, uncommon])
    example = random.permutation(example_words.repeat(counts(COMMON_WEIGHTS, COMMON_EXAMPLE)))

    count = counts(COMMON_WEIGHTS, total)
    listed = random.permutation(np.repeat(np.arange(len(words)), count))
    named = random.permutation(COMMON)  # the order in which the answers are named
    answer = common[named]
    start = np.concatenate([example, mark, example_answer])
    end = np.concatenate([mark, answer[:-1]])
    ids = [np.concatenate([start, kind[listed], end]) for kind in (words, other_words)]
    not_yet_named = np.triu(np.ones((COMMON, COMMON), dtype=bool))
    targets = np.where(not_yet_named, answer, NO_TOKEN)

    occurrences = count[named]
    before = np.cumsum(occurrences) - occurrences  # of words that were named before
    guess = (occurrences.sum() - before) / (total - before)
    at = np.arange(length - COMMON, length)
    yield Trial(np.stack(ids), at, targets, np.arange(len(places)), guess)


def frequent_words(
    random: np.random.Generator, text: np.ndarray, length: int, ranks: Sequence[float]
) -> Iterator[Trial]:
    """A list of words whose counts fall as 1 / rank; at its end the first three in their order.

    Before it stands a short list of other words with its answer.
    ranks: 1, 2, …, of the words that are asked for
    UserError where the text has too few different tokens, or the length is too short.
    """
    total = length - RANKED_EXAMPLE - 2 * (TOP + 1) + 1  # tokens of the list
    needed = 2 * RANKED + 1
    names = _names(random, text, needed, "frequent_words", length, 2 * RANKED_EXAMPLE - total)
    words, example_words, mark = np.split(names, [RANKED, 2 * RANKED])
    other_words = words[::-1]  # the rarest words are the most frequent ones
    example = random.permutation(example_words.repeat(counts(RANKED_WEIGHTS, RANKED_EXAMPLE)))

    count = counts(RANKED_WEIGHTS, total)
    listed = random.permutation(np.repeat(np.arange(RANKED), count))
    answer = words[:TOP]
    start = np.concatenate([example, mark, example_words[:TOP]])
    end = np.concatenate([mark, answer[:-1]])
    ids = [np.concatenate([start, kind[listed], end]) for kind in (words, other_words)]

    occurrences = count[:TOP]
    before = np.cumsum(occurrences) - occurrences  # of words that were named before
    guess = occurrences / (total - before)
    at = np.arange(length - TOP, length)
    yield Trial(np.stack(ids), at, answer, np.arange(len(ranks)), guess)


def counts(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to the weights that add up to the total: [len(weights)] int64.

    The largest remainders are rounded up.
    """
    exact = weights / weights.sum() * total
    whole = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(whole - exact, kind="stable")
    whole[by_remainder[: total - whole.sum()]] += 1
    return whole


def _names(
    random: np.random.Generator,
    text: np.ndarray,
    needed: int,
    task: str,
    length: int,
    lacking: int,
) -> np.ndarray:
    """So many different tokens; UserError where the text has fewer, or the list lacks tokens."""
    words = words_of(text)
    if len(words) < needed or lacking > 0:
        raise UserError(
            f"{task} needs {needed} different tokens, the text has {len(words)},"
            f" and a length of {length + max(lacking, 0)} or more"
            " - give another text or longer lengths"
        )
    return random.permutation(words)[:needed]


TASKS = {
    "common_words": Task(
        common_words,
        places=range(COMMON),
        form={"common": COMMON, "times": TIMES, "uncommon": UNCOMMON, "answers": COMMON},
    ),
    "frequent_words": Task(
        frequent_words,
        places=range(1, TOP + 1),
        form={"words": RANKED, "answers": TOP},
    ),
}
