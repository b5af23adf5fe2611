"""The text of a part: a share of one corpus's documents, or a blend of whole corpora.

Blends equal those of GPT-NeoX (2026), window by window.
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

# for each part, the split that puts everything into it
WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}
BLOCK = 2048  # windows per cached block
SURPLUS = 1.005  # how many more windows than its share each corpus gets, as in GPT-NeoX


@dataclass(frozen=True)
class Part:
    """Token files of a part, or a task.

    name: train, valid or test
    split: which documents of each file belong to the part
    weights: of the files in a blend; only the ratios matter. None for a share of one corpus
    """

    name: str
    files: tuple[TokenFile, ...]
    split: str
    weights: tuple[float, ...] = ()

    def samples(self, length: int, seed: int, num_samples: int) -> Indexable:
        """Windows for this many samples; UserError if there is no text."""
        if isinstance(self.files[0], TaskText):
            return self.files[0].samples(self.name, length, seed)
        if not self.weights:
            return self._read(length, seed, [num_samples])[0]
        counts = samples_of_each(self.weights, num_samples)
        return Blend(self._read(length, seed, counts), self.weights)

    def _read(self, length: int, seed: int, counts: Sequence[int]) -> list[Samples]:
        """The samples of each file."""
        return [
            build_split(tokens, self.split, self.name, length, seed, count)
            for tokens, count in zip(self.files, counts, strict=True)
        ]

    def facts(self) -> list[dict]:
        """The facts of each corpus: its name, the share that is read, and what identifies it."""
        use = {"part": self.name, "split": self.split}
        return [
            {"corpus": name_of(tokens), **use, "weight": weight, **tokens.identity()}
            for tokens, weight in zip(self.files, shares(self.weights or (1.0,)), strict=True)
        ]


def name_of(tokens: TokenFile) -> str:
    """The name of a corpus in rows and logs."""
    return tokens.meta.get("corpus") or tokens.prefix.name


def open_parts(data: Data, names: Iterable[str] = PARTS) -> dict[str, Part]:
    """The parts that a configuration defines, by name; parts without corpora are omitted.

    UserError for a missing or damaged token file, or if no part of `names` has text.
    """
    if (data.data_path or "").startswith(TASK_PREFIX):
        task = TaskText(str(data.data_path).removeprefix(TASK_PREFIX), data.task_args)
        return {name: Part(name, (cast(TokenFile, task),), data.split) for name in names}
    keys = {name: f"{name}_data_paths" for name in PARTS}
    if not any(getattr(data, key) for key in keys.values()):
        tokens = TokenFile(data.data_path or "")
        return {name: Part(name, (tokens,), data.split) for name in names}
    parts = {}
    for name in names:
        key = keys[name]
        try:
            files = tuple(map(TokenFile, getattr(data, key) or ()))
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
        raise UserError(f"{missing}: is not set - name the corpora to read")
    return parts


# --- Blending ---


class Blend:
    """Windows of length + 1 tokens of several corpora.

    Window k comes from the corpus that is furthest behind its share of k windows. `len` is the sum
    over the corpora. If the blend needs more windows than a corpus has, the corpus starts over, as
    in the reference.
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
    """Which corpus each window comes from, and how many windows of that corpus came before.

    Window k comes from the corpus with the largest max(k, 1) * weight - windows so far, in float64,
    the first one if several are equal: build_blending_indices in GPT-NeoX's helpers.cpp, which
    stores 9 bytes for each window. We only store the counts before each block, up to the last block
    that was used.
    """

    def __init__(self, weights: Sequence[float]):
        once = np.array(shares(weights))
        self.weights = (once / once.sum()).tolist()  # a second time, like the reference
        self._starts = [[0] * len(weights)]  # windows of each corpus before each block
        self._block = -1  # the latest block that was computed
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
    """Windows that each corpus must have for a blend of this size, as GPT-NeoX counts them."""
    return [math.ceil(num_samples * share * SURPLUS) for share in shares(weights)]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """GPT-NeoX's weight_by_num_documents: p ** alpha * (1 - p) for a share p of the documents.

    The second factor comes from the reference. So even with alpha = 1 large corpora get less than
    p.
    """
    if len(documents) == 1:
        return [1.0]
    parts = shares(documents)
    powers = shares([part**alpha for part in parts])
    return shares([power * (1 - part) for power, part in zip(powers, parts, strict=True)])
