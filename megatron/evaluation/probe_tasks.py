"""Questions to a model about what it has read: retrieval, and tasks in the manner of RULER.

They are sized for models that were trained on text alone. Tokens of the held-out text stand for
words, and instructions are left out: a pattern, or a small example in the context, shows what is
asked. The same is asked of a context with other answers: a gain of log-probability shows before any
argmax. To copy what stood behind the same token before (induction, arXiv 2209.11895) is what small
language models learn of retrieval. The other tasks are RULER's (arXiv 2404.06654).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from megatron.errors import UserError

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


def check_possible(task: str, needed: int, text: np.ndarray, length: int, lacking: int) -> None:
    """Raises UserError if the text has too few different tokens, or the context lacks tokens."""
    count = len(words_of(text))
    if count < needed or lacking > 0:
        raise UserError(
            f"{task} needs {needed} different tokens, the text has {count},"
            f" and a length of {length + max(lacking, 0)} or more"
            " - give another text or longer lengths"
        )


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
    return np.insert(filler, np.repeat(spots, pieces.shape[1]), pieces.ravel())


# --- Retrieval: can a model repeat what it has read? ---

CUE = 4  # tokens that ask for the needle
NEEDLE = 8  # tokens of the needle
PAIRS = 4  # pairs of key and value at each depth


def passkey(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """A cue and a needle in the text, at one depth; at its end the cue again: what follows?"""
    filler = filler_of(random, text, length)
    words = words_of(text)
    cue = random.choice(words, CUE, replace=False)
    needle = random.choice(words, NEEDLE, replace=False)
    other = random.choice(words, NEEDLE, replace=False)
    question = np.concatenate([cue, needle[:-1]])
    question_start = length - len(question)
    at = np.arange(length - NEEDLE, length)
    for cell, depth in enumerate(depths):
        start = round(depth * (question_start - CUE - NEEDLE))
        needle_start = start + CUE
        ids = np.stack([filler, filler])
        ids[:, question_start:] = question
        ids[:, start:needle_start] = cue
        ids[:, needle_start : needle_start + NEEDLE] = needle, other
        yield Trial(ids, at, needle, np.full(NEEDLE, cell))


def copy(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """A random string, and length / 2 later the same again. The depths are equal parts of it."""
    half = length // 2
    string, other = random.choice(words_of(text), (2, half))
    ids = np.stack([np.concatenate([string, string]), np.concatenate([other, string])])
    # The first token of the copy is not asked for: nothing says that the string starts again.
    place = np.arange(1, half)
    yield Trial(ids, half + place - 1, string[1:], place * len(depths) // half)


def recall(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """Pairs of a key and its value at every depth; at the end each key again: which value?

    The keys stand there in another order (multi-query associative recall, arXiv 2312.04927).
    """
    count = PAIRS * len(depths)
    words = random.permutation(words_of(text))
    check_possible("recall", 2 * count, text, length, 4 * count - length)
    keys = words[:count]
    values = words[count : 2 * count]
    other_values = np.roll(values, 1)  # each key has another's value
    order = random.permutation(count)  # of the questions
    filler = filler_of(random, text, length)
    # A key may stand before its value only.
    replace_tokens(random, filler, keys, words[count:])

    ids = np.stack([filler, filler])
    question_start = length - 2 * count
    spare = question_start - 2 * count  # tokens of filler between the pairs
    for pair in range(count):
        start = 2 * pair + round(depths[pair // PAIRS] * spare)
        ids[:, start] = keys[pair]
        ids[:, start + 1] = values[pair], other_values[pair]
    ids[:, question_start::2] = keys[order]
    ids[:, question_start + 1 :: 2] = values[order]
    at = np.arange(question_start, length, 2)
    yield Trial(ids, at, values[order], order // PAIRS)


# --- RULER: can it tell keys apart, and follow chains? ---

KEYED = 4  # tokens of a needle with a key: cue, two of the key, value
NEEDLES = 4  # of multikey
FEWEST = 9  # different tokens: the cue, a square of 2 x 2, two values, and two for the text
CHAINS = 4  # of variables, each with a value
HOPS = 4  # assignments of a variable to a variable in each chain
EXAMPLES = 2  # further chains, whose questions are answered in the context


def multikey(
    random: np.random.Generator,
    text: np.ndarray,
    length: int,
    depths: Sequence[float],
    *,
    most: int | None = NEEDLES,
) -> Iterator[Trial]:
    """Needles of two key tokens and a value in the text; at its end one key again: which value?

    Every key token is in several keys, so only both together name the value. At depth d the asked
    needle stands there, and the fraction d of the other needles stands before it.
    most: needles; None: as many as fit, which leaves hardly any text
    """
    check_possible("multikey", FEWEST, text, length, lacking=0)
    words = random.permutation(words_of(text))
    question_start = length - (KEYED - 1)
    fitting = question_start // KEYED
    wanted = fitting if most is None else min(most, fitting)
    # Keys are cells of a square of tokens. A quarter of the words for each side leaves values.
    side = min(math.ceil(math.sqrt(wanted)), len(words) // 4)
    count = min(wanted, side**2)
    cue, first_of_key, second_of_key, rest = np.split(words, np.cumsum([1, side, side]))
    row, column = np.divmod(random.permutation(side**2)[:count], side)
    values = rest[: min(count, len(rest) // 2)]
    number = np.arange(count)
    value = values[number % len(values)]
    cues = np.repeat(cue, count)
    needles = np.stack([cues, first_of_key[row], second_of_key[column], value], axis=1)
    other_needles = needles.copy()
    other_needles[:, -1] = values[(number + 1) % len(values)]

    filler = filler_of(random, text, question_start - needles.size)
    replace_tokens(random, filler, needles.ravel(), rest[len(values) :])
    guess = np.mean(value == value[0], keepdims=True)  # needle 0 is the asked one
    for cell, depth in enumerate(depths):
        before = round(depth * (count - 1))
        spot = round(depth * len(filler))
        order = np.insert(np.arange(1, count), before, 0)
        spots_before = np.sort(random.integers(0, spot + 1, before))
        spots_after = np.sort(random.integers(spot, len(filler) + 1, count - 1 - before))
        spots = np.concatenate([spots_before, [spot], spots_after])
        contexts = [inserted(filler, pieces[order], spots) for pieces in (needles, other_needles)]
        yield _one_answer(contexts, needles[0, :-1], value[0], cell, guess)


def variable_tracking(
    random: np.random.Generator, text: np.ndarray, length: int, hops: Sequence[float]
) -> Iterator[Trial]:
    """Chains of assignments in the text (A = value, B = A, C = B); at its end: which value has C?

    The assignments of a chain keep their order, and those of all chains are mixed. Two further
    chains are examples: the same question, with its answer, stands before the one that counts.
    hops: assignments from variable to variable between the asked variable and the value
    """
    chains = CHAINS + EXAMPLES
    links = HOPS + 1  # assignments of a chain
    needed = 2 + chains * (links + 1) + 1
    words = random.permutation(words_of(text))
    question_start = length - (3 * EXAMPLES + 2)
    spare = question_start - 3 * chains * links  # tokens of filler
    check_possible("variable_tracking", needed, text, length, -spare)
    be, ask = words[:2]
    # Of each chain: its value, and the variables in the order of their assignments.
    names = words[2 : needed - 1].reshape(chains, links + 1)
    other_names = names.copy()
    other_names[:CHAINS, 0] = np.roll(names[:CHAINS, 0], 1)  # each chain has another's value
    filler = filler_of(random, text, spare)
    replace_tokens(random, filler, words[: needed - 1], words[needed - 1 :])
    spots = np.sort(random.integers(0, spare + 1, chains * links))
    chain = random.permutation(np.repeat(np.arange(chains), links))  # of each assignment
    link = np.empty_like(chain)  # how many of its chain stand before each assignment
    for number in range(chains):
        link[chain == number] = np.arange(links)
    contexts = []
    for known in (names, other_names):
        source, variable = known[chain, link], known[chain, link + 1]
        assignments = np.stack([np.repeat(be, len(chain)), variable, source], axis=1)
        contexts.append(inserted(filler, assignments, spots))

    guess = np.array([1 / CHAINS])
    values = names[:, 0]
    for cell, hop in enumerate(hops):
        variables = names[:, int(hop) + 1]
        question: list[int] = []
        for example in range(CHAINS, chains):
            question += [ask, variables[example], values[example]]
        yield _one_answer(contexts, [*question, ask, variables[0]], values[0], cell, guess)


def _one_answer(
    contexts: Sequence[np.ndarray],
    question: Sequence[int] | np.ndarray,
    answer: int,
    cell: int,
    guess: np.ndarray,
) -> Trial:
    """The same question behind two contexts, answered by one token at the end."""
    ids = np.stack([np.concatenate([context, question]) for context in contexts])
    return Trial(ids, np.array([ids.shape[1] - 1]), np.array([answer]), np.array([cell]), guess)


# --- RULER: can it count? ---
# A list has a fixed number of different words, whatever its length. So the guess rate hardly
# depends on the length, and longer lists differ in nothing but their counts.

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
    """
    total = length - COMMON_EXAMPLE - 2 * (COMMON + 1) + 1  # tokens of the list
    needed = 2 * COMMON + UNCOMMON + 1
    check_possible("common_words", needed, text, length, 2 * COMMON_EXAMPLE - total)
    names = random.permutation(words_of(text))[:needed]
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
    ids = _lists(start, (words, other_words), listed, mark, answer)
    not_yet_named = np.triu(np.ones((COMMON, COMMON), dtype=bool))
    targets = np.where(not_yet_named, answer, NO_TOKEN)

    occurrences = count[named]
    before = np.cumsum(occurrences) - occurrences  # of words that were named before
    guess = (occurrences.sum() - before) / (total - before)
    yield Trial(ids, np.arange(length - COMMON, length), targets, np.arange(len(places)), guess)


def frequent_words(
    random: np.random.Generator, text: np.ndarray, length: int, ranks: Sequence[float]
) -> Iterator[Trial]:
    """A list of words whose counts fall as 1 / rank; at its end the first three in their order.

    Before it stands a short list of other words with its answer.
    ranks: 1, 2, …, of the words that are asked for
    """
    total = length - RANKED_EXAMPLE - 2 * (TOP + 1) + 1  # tokens of the list
    needed = 2 * RANKED + 1
    check_possible("frequent_words", needed, text, length, 2 * RANKED_EXAMPLE - total)
    names = random.permutation(words_of(text))[:needed]
    words, example_words, mark = np.split(names, [RANKED, 2 * RANKED])
    example = random.permutation(example_words.repeat(counts(RANKED_WEIGHTS, RANKED_EXAMPLE)))

    count = counts(RANKED_WEIGHTS, total)
    listed = random.permutation(np.repeat(np.arange(RANKED), count))
    answer = words[:TOP]
    start = np.concatenate([example, mark, example_words[:TOP]])
    # In the other context the rarest words are the most frequent ones.
    ids = _lists(start, (words, words[::-1]), listed, mark, answer)

    occurrences = count[:TOP]
    before = np.cumsum(occurrences) - occurrences  # of words that were named before
    guess = occurrences / (total - before)
    yield Trial(ids, np.arange(length - TOP, length), answer, np.arange(len(ranks)), guess)


def _lists(
    start: np.ndarray,
    words_of_lists: Sequence[np.ndarray],
    listed: np.ndarray,
    mark: np.ndarray,
    answer: np.ndarray,
) -> np.ndarray:
    """Lists in one order of two sets of words, with the same start and end: [2, length]."""
    end = np.concatenate([mark, answer[:-1]])
    return np.stack([np.concatenate([start, words[listed], end]) for words in words_of_lists])


def counts(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to the weights that add up to the total: [len(weights)] int64.

    The largest remainders are rounded up.
    """
    exact = weights / weights.sum() * total
    whole = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(whole - exact, kind="stable")
    whole[by_remainder[: total - whole.sum()]] += 1
    return whole


NEEDLE_FORM = {"key_tokens": KEYED - 2, "answers": 1}
CHAIN_FORM = {"chains": CHAINS, "hops": HOPS, "examples": EXAMPLES, "answers": 1}
COMMON_FORM = {"common": COMMON, "times": TIMES, "uncommon": UNCOMMON, "answers": COMMON}

TASKS = {
    "passkey": Task(passkey),
    "copy": Task(copy),
    "recall": Task(recall),
    "multikey": Task(multikey, form={"needles": NEEDLES, **NEEDLE_FORM}),
    "multikey_dense": Task(partial(multikey, most=None), form=NEEDLE_FORM),
    "variable_tracking": Task(variable_tracking, range(HOPS + 1), CHAIN_FORM),
    "common_words": Task(common_words, range(COMMON), COMMON_FORM),
    "frequent_words": Task(frequent_words, range(1, TOP + 1), {"words": RANKED, "answers": TOP}),
}
