"""Tasks in the manner of RULER (arXiv 2404.06654), for models that were trained on text alone.

Tokens of the held-out text stand for its English words. Instructions are left out: a pattern, or
a small example in the context, shows what is asked. Each row says the sizes of its task.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from megatron.errors import UserError
from megatron.evaluation.probes.trials import (
    Task,
    Trial,
    filler_of,
    inserted,
    replace_tokens,
    words_of,
)
from megatron.evaluation.probes.word_lists import TASKS as WORD_LISTS

NEEDLE = 4  # tokens: cue, two of the key, value
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
    UserError where the text has too few different tokens.
    """
    words = random.permutation(words_of(text))
    if len(words) < FEWEST:
        raise UserError(
            f"multikey needs {FEWEST} different tokens, the text has {len(words)}"
            " - give another text"
        )
    question_start = length - (NEEDLE - 1)
    fitting = question_start // NEEDLE
    wanted = fitting if most is None else min(most, fitting)
    # Keys are cells of a square of tokens. A quarter of the words for each side leaves values.
    side = min(math.ceil(math.sqrt(wanted)), len(words) // 4)
    count = min(wanted, side**2)
    cue, first_of_key, second_of_key, rest = np.split(words, np.cumsum([1, side, side]))
    row, column = np.divmod(random.permutation(side**2)[:count], side)
    values = rest[: min(count, len(rest) // 2)]
    number = np.arange(count)
    value = values[number % len(values)]
    other_value = values[(number + 1) % len(values)]
    cues = np.repeat(cue, count)
    needles = np.stack([cues, first_of_key[row], second_of_key[column], value], axis=1)
    other_needles = needles.copy()
    other_needles[:, -1] = other_value

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
        question = needles[0, :-1]
        ids = np.stack([np.concatenate([context, question]) for context in contexts])
        yield Trial(ids, np.array([length - 1]), value[:1], np.array([cell]), guess)


def variable_tracking(
    random: np.random.Generator, text: np.ndarray, length: int, hops: Sequence[float]
) -> Iterator[Trial]:
    """Chains of assignments in the text (A = value, B = A, C = B); at its end: which value has C?

    The assignments of a chain keep their order, and those of all chains are mixed. Two further
    chains are examples: the same question, with its answer, stands before the one that counts.
    hops: assignments from variable to variable between the asked variable and the value
    UserError where the text has too few different tokens, or the length is too short.
    """
    chains = CHAINS + EXAMPLES
    links = HOPS + 1  # assignments of a chain
    needed = 2 + chains * (links + 1) + 1
    words = random.permutation(words_of(text))
    question_start = length - (3 * EXAMPLES + 2)
    spare = question_start - 3 * chains * links  # tokens of filler
    if len(words) < needed or spare < 0:
        raise UserError(
            f"variable_tracking needs {needed} different tokens, the text has {len(words)},"
            f" and a length of {length - min(spare, 0)} or more"
            " - give another text or longer lengths"
        )
    be, ask = words[:2]
    # Of each chain: its value, and the variables in the order of their assignments.
    names = words[2 : needed - 1].reshape(chains, links + 1)
    other_names = names.copy()
    other_names[:CHAINS, 0] = np.roll(names[:CHAINS, 0], 1)  # each chain has another's value
    filler = filler_of(random, text, spare)
    replace_tokens(random, filler, words[: needed - 1], words[needed - 1 :])
    spots = np.sort(random.integers(0, spare + 1, chains * links))
    chain = random.permutation(np.repeat(np.arange(chains), links))  # of each assignment
    link = _number_within(chain)
    contexts = []
    for known in (names, other_names):
        source, variable = known[chain, link], known[chain, link + 1]
        assignments = np.stack([np.repeat(be, len(chain)), variable, source], axis=1)
        contexts.append(inserted(filler, assignments, spots))

    guess = np.array([1 / CHAINS])
    for cell, hop in enumerate(hops):
        variables, values = names[:, int(hop) + 1], names[:, 0]
        question: list[int] = []
        for example in range(CHAINS, chains):
            question += [ask, variables[example], values[example]]
        question += [ask, variables[0]]
        ids = np.stack([np.concatenate([context, question]) for context in contexts])
        yield Trial(ids, np.array([length - 1]), values[:1], np.array([cell]), guess)


def _number_within(groups: np.ndarray) -> np.ndarray:
    """How many equal entries stand before each one: [1, 0, 1, 1] -> [0, 0, 1, 2]."""
    number = np.empty_like(groups)
    for group in np.unique(groups):
        members = groups == group
        number[members] = np.arange(members.sum())
    return number


NEEDLE_FORM = {"key_tokens": NEEDLE - 2, "answers": 1}
CHAIN_FORM = {"chains": CHAINS, "hops": HOPS, "examples": EXAMPLES, "answers": 1}

TASKS = {
    "multikey": Task(multikey, form={"needles": NEEDLES, **NEEDLE_FORM}),
    "multikey_dense": Task(partial(multikey, most=None), form=NEEDLE_FORM),
    "variable_tracking": Task(variable_tracking, range(HOPS + 1), CHAIN_FORM),
    **WORD_LISTS,
}
