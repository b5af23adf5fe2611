"""The text of a part: a share of the documents of one corpus, or whole corpora that are blended.

Blends are those of GPT-NeoX (2026), window for window.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron.config.schema import Data
from megatron.data.loader import Indexable
from megatron.data.samples import Samples, build_split
from megatron.data.tasks import TaskText
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.splits import PARTS, TASK_PREFIX, plain_sum

WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}  # the split that is all of a part
BLOCK = 2048  # windows whose turns are kept
SURPLUS = 1.005  # each corpus gets so many more windows than its share, as in GPT-NeoX


@dataclass(frozen=True)
class Part:
    """Token files of a part, or a task.

    name: train, valid or test
    split: what of each file belongs to the part
    weights: of the files in a blend; only their ratios count. None for a share of one corpus
    """

    name: str
    files: tuple[TokenFile, ...]
    split: str
    weights: tuple[float, ...] = ()

    def samples(self, length: int, seed: int, num_samples: int) -> Indexable:
        """Windows for so many samples; UserError if there is no text."""
        if isinstance(self.files[0], TaskText):
            return self.files[0].samples(self.name, length, seed)
        if not self.weights:
            return self._read(length, seed, [num_samples])[0]
        counts = samples_of_each(self.weights, num_samples)
        return Blend(self._read(length, seed, counts), self.weights)

    def _read(self, length: int, seed: int, counts: Sequence[int]) -> list[Samples]:
        """So many samples of each file."""
        return [
            build_split(tokens, self.split, self.name, length, seed, count)
            for tokens, count in zip(self.files, counts, strict=True)
        ]

    def facts(self) -> list[dict]:
        """Each corpus: its name, which share of it is read, and what it is."""
        use = {"part": self.name, "split": self.split}
        return [
            {"corpus": name_of(tokens), **use, "weight": weight, **tokens.identity()}
            for tokens, weight in zip(self.files, shares(self.weights or (1.0,)), strict=True)
        ]


def name_of(tokens: TokenFile) -> str:
    """The name of a corpus in rows and logs."""
    return tokens.meta.get("corpus") or tokens.prefix.name


def open_parts(data: Data, names: Iterable[str] = PARTS) -> dict[str, Part]:
    """The parts that a configuration names, by name; a part without corpora is left out.

    UserError for a token file that is missing or damaged, and where no part of `names` has text.
    """
    if (data.data_path or "").startswith(TASK_PREFIX):
        task = TaskText(str(data.data_path).removeprefix(TASK_PREFIX), data.task_args)
        return {name: Part(name, (cast(TokenFile, task),), data.split) for name in names}
    keys = {name: f"{name}_data_paths" for name in PARTS}
    if not any(getattr(data, key) for key in keys.values()):
        tokens = TokenFile.open(data.data_path or "")
        return {name: Part(name, (tokens,), data.split) for name in names}
    parts = {}
    for name in names:
        key = keys[name]
        try:
            files = tuple(map(TokenFile.open, getattr(data, key) or ()))
        except UserError as fault:
            raise UserError(str(fault).replace("data_path:", f"{key}:", 1)) from None
        if not files:
            continue
        weights = getattr(data, f"{name}_data_weights") or (1.0,) * len(files)
        if data.weight_by_num_documents:
            weights = weights_by_documents(list(map(len, files)), data.weighted_sampler_alpha)
        parts[name] = Part(name, files, WHOLE[name], tuple(weights))
    if not parts:
        missing = " and ".join(keys[name] for name in names)
        raise UserError(f"{missing}: not given - name the corpora to read")
    return parts


# --- Blending ---


class Blend:
    """Windows of length + 1 tokens of several corpora.

    Window k is that of the corpus that lags most behind its share of k windows. `len` is the sum of
    theirs. A corpus that the blend asks for more than it has starts over, as in the reference.
    """

    def __init__(self, samples: Sequence[Samples], weights: Sequence[float]):
        self.samples = samples
        self.turns = Turns(weights)

    def __len__(self) -> int:
        return sum(map(len, self.samples))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """[length + 1] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        corpus, number = self.turns[index]
        return self.samples[corpus].read(number)


class Turns:
    """Which corpus each window is of, and how many of that corpus came before.

    Window k is of the corpus with the largest max(k, 1) * weight - windows so far, in float64, the
    first of equals: build_blending_indices in GPT-NeoX's helpers.cpp, which keeps 9 bytes of each
    window. Here the counts before every block are kept, up to the highest that was asked for.
    """

    def __init__(self, weights: Sequence[float]):
        once = np.array(shares(weights))
        self.weights = (once / once.sum()).tolist()  # a second time, as the reference does
        self._starts = [[0] * len(weights)]  # windows of each corpus before each block
        self._block = -1  # the last whose turns were chosen
        self._turns = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        block, place = divmod(index, BLOCK)
        while block != self._block:
            self._choose(min(block, len(self._starts) - 1))
        return self._turns[place]

    def _choose(self, block: int) -> None:
        counts = list(self._starts[block])
        self._block, self._turns = block, []
        for window in range(block * BLOCK, (block + 1) * BLOCK):
            windows = float(max(window, 1))
            lags = [
                weight * windows - count for weight, count in zip(self.weights, counts, strict=True)
            ]
            corpus = lags.index(max(lags))
            self._turns.append((corpus, counts[corpus]))
            counts[corpus] += 1
        self._starts[block + 1 :] = self._starts[block + 1 :] or [counts]


def shares(weights: Sequence[float]) -> list[float]:
    """The weights, divided by their sum."""
    whole = plain_sum(weights)
    return [weight / whole for weight in weights]


def samples_of_each(weights: Sequence[float], num_samples: int) -> list[int]:
    """Windows that each corpus must have for a blend of so many, as GPT-NeoX counts them."""
    return [math.ceil(num_samples * share * SURPLUS) for share in shares(weights)]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """GPT-NeoX's weight_by_num_documents: p ** alpha * (1 - p) for a share p of the documents.

    The second factor is the reference's. So even with alpha = 1 large corpora get less than p.
    """
    if len(documents) == 1:
        return [1.0]
    parts = shares(documents)
    powers = shares([part**alpha for part in parts])
    return shares([power * (1 - part) for power, part in zip(powers, parts, strict=True)])
