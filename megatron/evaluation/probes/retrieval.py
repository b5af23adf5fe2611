"""Can a model repeat what it has read? Passkey, copy and associative recall.

The tasks are sized for models that were trained on text alone. Each asks for tokens that only the
context gives, drawn at random from those of the held-out text. To copy what stood behind the same
token before (induction, arXiv 2209.11895) is what small language models learn of retrieval. The
same is asked of a context with other answers: a gain of log-probability shows before any argmax.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron.errors import UserError
from megatron.evaluation.probes.trials import (
    Task,
    Trial,
    filler_of,
    replace_tokens,
    words_of,
)

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
    for cell, depth in enumerate(depths):
        start = round(depth * (question_start - CUE - NEEDLE))
        needle_start = start + CUE
        ids = np.stack([filler, filler])
        ids[:, question_start:] = question
        ids[:, start:needle_start] = cue
        ids[0, needle_start : needle_start + NEEDLE] = needle
        ids[1, needle_start : needle_start + NEEDLE] = other
        at = np.arange(length - NEEDLE, length)
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
    at = half + place - 1
    cell = place * len(depths) // half
    yield Trial(ids, at, string[1:], cell)


def recall(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """Pairs of a key and its value at every depth; at the end each key again: which value?

    The keys stand there in another order (multi-query associative recall, arXiv 2312.04927).
    UserError where the text has too few different tokens, or the length is too short.
    """
    count = PAIRS * len(depths)
    words = random.permutation(words_of(text))
    if len(words) < 2 * count or length < 4 * count:
        raise UserError(
            f"recall: {count} pairs need {2 * count} different tokens, the text has {len(words)},"
            f" and a length of {4 * count} or more - ask for fewer depths or longer lengths"
        )
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
        depth = depths[pair // PAIRS]
        start = 2 * pair + round(depth * spare)
        ids[:, start] = keys[pair]
        ids[:, start + 1] = values[pair], other_values[pair]
    ids[:, question_start::2] = keys[order]
    ids[:, question_start + 1 :: 2] = values[order]
    at = np.arange(question_start, length, 2)
    yield Trial(ids, at, values[order], order // PAIRS)


TASKS = {"passkey": Task(passkey), "copy": Task(copy), "recall": Task(recall)}
