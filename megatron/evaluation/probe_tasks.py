"""Questions to a model about what it has read: can it repeat tokens that only the context gives?

They are sized for models that were trained on text alone. Tokens of the held-out text stand for
words, and instructions are left out: a pattern in the context shows what is asked. The same is
asked of a context with other answers: a gain of log-probability shows before any argmax. To copy
what stood behind the same token before (induction, arXiv 2209.11895) is what small language models
learn of retrieval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.errors import UserError


@dataclass(frozen=True)
class Trial:
    """One context with the answers, and the same with other answers.

    ids: [2, length]
    at: [count] positions of the questions: targets[i] must be predicted at position at[i]
    targets: [count] the answers of the first context
    cell: [count] the number of the depth of each answer
    """

    ids: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    cell: np.ndarray


@dataclass(frozen=True)
class Material:
    """The parts that contexts of `length` tokens are made of.

    text: [length or more] tokens; a task draws its words from them, each once
    depths: of the answers, from 0 to 1; every trial asks about all
    """

    random: np.random.Generator
    text: np.ndarray
    length: int
    depths: Sequence[float]

    @property
    def words(self) -> np.ndarray:
        return np.unique(self.text)

    def filler(self) -> np.ndarray:
        """A random piece of the text: [length]."""
        start = int(self.random.integers(0, len(self.text) - self.length + 1))
        return self.text[start : start + self.length].copy()


CUE = 4  # tokens that ask for the needle
NEEDLE = 8  # tokens of the needle
PAIRS = 4  # pairs of key and value at each depth


def passkey(of: Material) -> Iterator[Trial]:
    """A cue and a needle in the text, at one depth; at its end the cue again: what follows?"""
    filler = of.filler()
    words = of.words
    cue = of.random.choice(words, CUE, replace=False)
    needle = of.random.choice(words, NEEDLE, replace=False)
    other = of.random.choice(words, NEEDLE, replace=False)
    question = np.concatenate([cue, needle[:-1]])
    question_start = of.length - len(question)
    at = np.arange(of.length - NEEDLE, of.length)
    for cell, depth in enumerate(of.depths):
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
    yield Trial(ids, half + place - 1, string[1:], place * len(of.depths) // half)


def recall(of: Material) -> Iterator[Trial]:
    """Pairs of a key and its value at every depth; at the end each key again: which value?

    The keys stand there in another order (multi-query associative recall, arXiv 2312.04927).
    """
    count = PAIRS * len(of.depths)
    question_start = of.length - 2 * count
    spare = question_start - 2 * count  # tokens of filler between the pairs
    needed = 2 * count  # different tokens
    if len(of.words) < needed or spare < 0:
        raise UserError(
            f"recall needs {needed} different tokens, the text has {len(of.words)}, and a length of"
            f" {of.length + max(-spare, 0)} or more - give another text or longer lengths"
        )
    words = of.random.permutation(of.words)
    keys, values = words[:count], words[count:needed]
    order = of.random.permutation(count)  # of the questions
    # A key may stand before its value only.
    filler = of.filler()
    is_key = np.isin(filler, keys)
    filler[is_key] = of.random.choice(words[count:], is_key.sum())

    ids = np.stack([filler, filler])
    depths = np.repeat(of.depths, PAIRS)
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


TASKS = {"passkey": passkey, "copy": copy, "recall": recall}
