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
NO_TOKENS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Trial:
    """One context with the answers, and the same with other answers.

    ids: [2, length]
    at: [count] positions of the questions: targets[i] must be predicted at position at[i]
    targets: [count] the answers of the first context; or [count, choices], where any of a line is
        right, and NO_TOKEN stands for none
    cell: [count] the number of the place (the depth, or the axis of its task) of each answer
    guess: accuracy of drawing among what the context offers, of all or [count]; nan: nothing
    """

    ids: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    cell: np.ndarray
    guess: np.ndarray | float = math.nan


@dataclass(frozen=True)
class Material:
    """The parts that contexts of `length` tokens are made of. They ask about every place.

    text: [length or more] tokens; a task draws its words from them, each once
    places: depths from 0 to 1, or numbers on the axis of a task
    """

    random: np.random.Generator
    text: np.ndarray
    length: int
    places: Sequence[float]

    @property
    def words(self) -> np.ndarray:
        return np.unique(self.text)

    def shuffled(self, task: str, needed: int, lacking: int = 0) -> np.ndarray:
        """The words in random order.

        Raises UserError if there are fewer than needed, or if the context lacks tokens.
        """
        words = self.words
        if len(words) < needed or lacking > 0:
            raise UserError(
                f"{task} needs {needed} different tokens, the text has {len(words)},"
                f" and a length of {self.length + max(lacking, 0)} or more"
                " - give another text or longer lengths"
            )
        return self.random.permutation(words)

    def filler(self, length: int, without: np.ndarray, spare: np.ndarray) -> np.ndarray:
        """A random piece of the text, with random `spare` ones in place of `without`: [length]."""
        start = int(self.random.integers(0, len(self.text) - length + 1))
        filler = self.text[start : start + length].copy()
        replaced = np.isin(filler, without)
        filler[replaced] = self.random.choice(spare, replaced.sum())
        return filler


@dataclass(frozen=True)
class Task:
    """A kind of question.

    trials: makes the contexts of one trial
    places: what rows are about, such as numbers of hops; None: the depths that the caller asks for
    form: the sizes that define the task; every row has them
    """

    trials: Callable[[Material], Iterator[Trial]]
    places: Sequence[float] | None = None
    form: Mapping[str, int] = field(default_factory=dict)


# --- Retrieval: can a model repeat what it has read? ---

CUE = 4  # tokens that ask for the needle
NEEDLE = 8  # tokens of the needle
PAIRS = 4  # pairs of key and value at each depth


def passkey(of: Material) -> Iterator[Trial]:
    """A cue and a needle in the text, at one depth; at its end the cue again: what follows?"""
    filler = of.filler(of.length, NO_TOKENS, NO_TOKENS)
    words = of.words
    cue = of.random.choice(words, CUE, replace=False)
    needle = of.random.choice(words, NEEDLE, replace=False)
    other = of.random.choice(words, NEEDLE, replace=False)
    question = np.concatenate([cue, needle[:-1]])
    question_start = of.length - len(question)
    at = np.arange(of.length - NEEDLE, of.length)
    for cell, depth in enumerate(of.places):
        start = round(depth * (question_start - CUE - NEEDLE))
        needle_start = start + CUE
        ids = np.stack([filler, filler])
        ids[:, question_start:] = question
        ids[:, start:needle_start] = cue
        ids[:, needle_start : needle_start + NEEDLE] = needle, other
        yield Trial(ids, at, needle, np.full(NEEDLE, cell))


def copy(of: Material) -> Iterator[Trial]:
    """A random string, and length / 2 later the same again. The depths are equal parts of it."""
    half = of.length // 2
    string, other = of.random.choice(of.words, (2, half))
    ids = np.stack([np.concatenate([string, string]), np.concatenate([other, string])])
    # The first token of the copy is not asked for: nothing says that the string starts again.
    place = np.arange(1, half)
    yield Trial(ids, half + place - 1, string[1:], place * len(of.places) // half)


def recall(of: Material) -> Iterator[Trial]:
    """Pairs of a key and its value at every depth; at the end each key again: which value?

    The keys stand there in another order (multi-query associative recall, arXiv 2312.04927).
    """
    count = PAIRS * len(of.places)
    question_start = of.length - 2 * count
    spare = question_start - 2 * count  # tokens of filler between the pairs
    words = of.shuffled("recall", 2 * count, -spare)
    keys = words[:count]
    values = words[count : 2 * count]
    order = of.random.permutation(count)  # of the questions
    # A key may stand before its value only.
    filler = of.filler(of.length, keys, words[count:])

    ids = np.stack([filler, filler])
    depths = np.repeat(of.places, PAIRS)
    filler_before = np.round(depths * spare).astype(np.int64)
    start = 2 * np.arange(count) + filler_before
    ids[:, start] = keys
    ids[:, start + 1] = values, np.roll(values, 1)  # in the other context each has another's value
    answers = values[order]
    ids[:, question_start::2] = keys[order]
    ids[:, question_start + 1 :: 2] = answers
    at = np.arange(question_start, of.length, 2)
    cells = order // PAIRS
    yield Trial(ids, at, answers, cells)


# --- RULER: can it tell keys apart, and follow chains? ---

KEYED = 4  # tokens of a needle with a key: cue, two of the key, value
NEEDLES = 4  # of multikey
FEWEST = 9  # different tokens: the cue, a square of 2 x 2, two values, and two for the text
CHAINS = 4  # of variables, each with a value
HOPS = 4  # assignments of a variable to a variable in each chain
EXAMPLES = 2  # further chains, whose questions are answered in the context


def multikey(of: Material, *, most: int | None = NEEDLES) -> Iterator[Trial]:
    """Needles of two key tokens and a value in the text; at its end one key again: which value?

    Every key token is in several keys, so only both together name the value. At depth d the asked
    needle stands there, and the fraction d of the other needles stands before it.
    most: needles; None: as many as fit, which leaves hardly any text
    """
    words = of.shuffled("multikey", FEWEST)
    question_start = of.length - (KEYED - 1)
    fitting = question_start // KEYED
    needles_at_most = fitting if most is None else min(most, fitting)
    # Keys are cells of a square of tokens. A quarter of the words for each side leaves values.
    smallest = math.ceil(math.sqrt(needles_at_most))
    side = min(smallest, len(words) // 4)
    count = min(needles_at_most, side**2)
    ends = np.cumsum([1, side, side])
    cue, first_of_key, second_of_key, rest = np.split(words, ends)
    keys = of.random.permutation(side**2)[:count]
    row, column = np.divmod(keys, side)
    different = min(count, len(rest) // 2)
    values, spare = rest[:different], rest[different:]
    number = np.arange(count)
    value = values[number % different]
    cues = np.repeat(cue, count)
    needles = np.stack([cues, first_of_key[row], second_of_key[column], value], axis=1)
    other_needles = needles.copy()
    other_needles[:, -1] = values[(number + 1) % different]

    filler = of.filler(question_start - needles.size, needles, spare)
    question = needles[0, :-1]  # needle 0 is the asked one
    guess = np.mean(value == value[0])
    for cell, depth in enumerate(of.places):
        before = round(depth * (count - 1))
        after = count - 1 - before
        spot = round(depth * len(filler))
        order = np.insert(np.arange(1, count), before, 0)
        spots_before = np.sort(of.random.integers(0, spot + 1, before))
        spots_after = np.sort(of.random.integers(spot, len(filler) + 1, after))
        spots = np.concatenate([spots_before, [spot], spots_after])
        context = _inserted(filler, needles[order], spots)
        other_context = _inserted(filler, other_needles[order], spots)
        yield _one_answer([context, other_context], question, value[0], cell, guess)


def variable_tracking(of: Material) -> Iterator[Trial]:
    """Chains of assignments in the text (A = value, B = A, C = B); at its end: which value has C?

    The assignments of a chain keep their order, and those of all chains are mixed. Two further
    chains are examples: the same question, with its answer, stands before the one that counts.
    places: assignments from variable to variable between the asked variable and the value
    """
    chains = CHAINS + EXAMPLES
    links = HOPS + 1  # assignments of a chain
    needed = 2 + chains * (links + 1) + 1
    count = chains * links  # of all assignments
    spare = of.length - (3 * EXAMPLES + 2) - 3 * count  # tokens of filler
    words = of.shuffled("variable_tracking", needed, -spare)
    be, ask = words[:2]
    # Of each chain: its value, and the variables in the order of their assignments.
    names = words[2 : needed - 1].reshape(chains, links + 1)
    other_names = names.copy()
    other_names[:CHAINS, 0] = np.roll(names[:CHAINS, 0], 1)  # each chain has another's value
    filler = of.filler(spare, words[: needed - 1], words[needed - 1 :])
    spots = np.sort(of.random.integers(0, spare + 1, count))
    unmixed = np.repeat(np.arange(chains), links)
    chain = of.random.permutation(unmixed)  # of each assignment
    order = np.argsort(chain, kind="stable")
    by_chain = np.argsort(order)
    link = by_chain % links  # how many of its chain stand before each assignment
    contexts = []
    for names_of_context in (names, other_names):
        source = names_of_context[chain, link]
        variable = names_of_context[chain, link + 1]
        be_tokens = np.repeat(be, count)
        assignments = np.stack([be_tokens, variable, source], axis=1)
        contexts.append(_inserted(filler, assignments, spots))

    values = names[:, 0]
    for cell, hop in enumerate(of.places):
        variables = names[:, int(hop) + 1]
        question: list[int] = []
        for example in range(CHAINS, chains):
            question += [ask, variables[example], values[example]]
        yield _one_answer(contexts, [*question, ask, variables[0]], values[0], cell, 1 / CHAINS)


def _inserted(filler: np.ndarray, pieces: np.ndarray, spots: np.ndarray) -> np.ndarray:
    """The filler with pieces between its tokens.

    filler [n], pieces [count, size], spots [count]: tokens of filler before each piece, ascending
    -> [n + count * size]
    """
    return np.insert(filler, np.repeat(spots, pieces.shape[1]), pieces.ravel())


def _one_answer(
    contexts: Sequence[np.ndarray],
    question: Sequence[int] | np.ndarray,
    answer: int,
    cell: int,
    guess: float,
) -> Trial:
    """The same question behind two contexts, answered by one token at the end."""
    ids = np.stack([np.concatenate([context, question]) for context in contexts])
    at, targets, cells = np.array([[ids.shape[1] - 1], [answer], [cell]])
    return Trial(ids, at, targets, cells, guess)


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


def common_words(of: Material) -> Iterator[Trial]:
    """A list of words; at its end the words that occur most often, in any order.

    Before it stands a short list with its answer. It has other common words and the same uncommon
    ones. A target is any common word that was not named before.
    places: 0, 1, … common words were named before
    """

    def lists(names: np.ndarray) -> list[np.ndarray]:
        common, example_answer, uncommon = np.split(names, [COMMON, 2 * COMMON])
        # Four uncommon words and the common ones change places.
        other_words = [uncommon[:COMMON], common, uncommon[COMMON:]]
        several = [[common, uncommon], other_words, [example_answer, uncommon]]
        return [np.concatenate(words) for words in several]

    needed = 2 * COMMON + UNCOMMON
    example = COMMON * TIMES + UNCOMMON
    yield _counting(of, "common_words", needed, lists, COMMON_WEIGHTS, example, in_order=False)


def frequent_words(of: Material) -> Iterator[Trial]:
    """A list of words whose counts fall as 1 / rank; at its end the first three in their order.

    Before it stands a short list of other words with its answer. In the other context the rarest
    words are the most frequent ones.
    places: 1, 2, …, ranks of the words that are asked for
    """

    def lists(names: np.ndarray) -> list[np.ndarray]:
        words = names[:RANKED]
        return [words, words[::-1], names[RANKED:]]

    example = 2 * RANKED
    yield _counting(of, "frequent_words", example, lists, RANKED_WEIGHTS, example, in_order=True)


def _counting(
    of: Material,
    task: str,
    needed: int,
    lists: Callable[[np.ndarray], list[np.ndarray]],
    weights: np.ndarray,
    example_length: int,
    *,
    in_order: bool,
) -> Trial:
    """An example with its answer, then a list, whose first words are asked for.

    lists: `needed` words -> those of the list, of that of the other context and of the example's,
        in the order of the weights of their counts
    in_order: whether the answers are named in this order; else any that was not named is right
    """
    answers = len(of.places)
    total = of.length - example_length - 2 * (answers + 1) + 1  # tokens of the list
    names = of.shuffled(task, needed + 1, 2 * example_length - total)
    words, other_words, example_words = lists(names[:needed])
    mark = names[needed : needed + 1]  # stands behind a list
    example = of.random.permutation(example_words.repeat(counts(weights, example_length)))
    count = counts(weights, total)
    listed = of.random.permutation(np.repeat(np.arange(len(words)), count))
    named = np.arange(answers) if in_order else of.random.permutation(answers)
    answer = words[named]
    start = np.concatenate([example, mark, example_words[:answers]])
    end = np.concatenate([mark, answer[:-1]])
    lists_of_words = [words[listed], other_words[listed]]
    ids = np.stack([np.concatenate([start, listed_words, end]) for listed_words in lists_of_words])

    right = count[named]  # tokens of the list that are right
    before = np.cumsum(right) - right  # tokens of words that were named before
    targets = answer
    if not in_order:
        not_yet_named = np.triu(np.ones((answers, answers), dtype=bool))
        targets = np.where(not_yet_named, answer, NO_TOKEN)
        right = right.sum() - before
    at = np.arange(of.length - answers, of.length)
    return Trial(ids, at, targets, np.arange(answers), right / (total - before))


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
