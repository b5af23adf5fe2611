"""The text of a part: a share of the documents of one corpus, or whole corpora that are blended.

Blends are those of GPT-NeoX (2026), window for window.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.schema import Data
from megatron.data.samples import Samples, build_split, windows_of_an_epoch
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.splits import PARTS

log = logging.getLogger(__name__)

WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}  # the split that is all of a part
BLOCK = 2048  # windows that are divided among the corpora at a time
LEAST, MOST = 64, 4096  # blocks whose first counts are computed together
SURPLUS = 1.005  # each corpus gets so many more windows than its share, as in GPT-NeoX


@dataclass(frozen=True)
class Part:
    """Token files of a part.

    name: train, valid or test
    split: what of each file belongs to the part
    weights: of the files in a blend; only their ratios count. None for a share of one corpus
    """

    name: str
    files: tuple[TokenFile, ...]
    split: str
    weights: tuple[float, ...] = ()

    def samples(self, length: int, seed: int, num_samples: int) -> "Samples | Blend":
        """Windows for so many samples; UserError if there is no text."""
        if not self.weights:
            return self._of(self.files[0], length, seed, num_samples)
        counts = samples_of_each(self.weights, num_samples)
        several = []
        for tokens, count in zip(self.files, counts, strict=True):
            several.append(self._of(tokens, length, seed, count))
            passes = count * length / tokens.tokens
            if passes > 1 and self.name == "train":
                log.info(
                    "%s: %s is read %.1f times, its weight asks for %d samples of %d tokens",
                    *(self.name, name_of(tokens), passes, count, length),
                )
        return Blend(several, self.weights)

    def epoch(self, length: int, seed: int) -> "Samples | Blend":
        """Every window once; several corpora take turns in proportion to their windows."""
        several = [self._of(tokens, length, seed, 1) for tokens in self.files]
        if not self.weights:
            return several[0]
        return Blend(several, [len(samples) for samples in several])

    def windows_of_an_epoch(self, length: int) -> int:
        """How many windows `epoch` has, without building it."""
        return sum(
            windows_of_an_epoch(tokens, self.split, self.name, length) for tokens in self.files
        )

    def _of(self, tokens: TokenFile, length: int, seed: int, count: int) -> Samples:
        return build_split(tokens, self.split, self.name, length, seed, count)

    def __str__(self) -> str:
        """`train: github 0.667 (5,599 documents, 23,524,707 tokens), arxiv 0.333 (…)`."""
        described = []
        for facts in self.facts():
            size = f"{facts['documents']:,} documents, {facts['tokens']:,} tokens"
            described.append(f"{facts['corpus']} {facts['weight']:.3g} ({size})")
        return f"{self.name}: {', '.join(described)}"

    @property
    def names(self) -> str:
        """`github 0.667, arxiv 0.333`."""
        return ", ".join(f"{one['corpus']} {one['weight']:.3g}" for one in self.facts())

    def facts(self) -> list[dict[str, Any]]:
        """Each corpus of a blend: its name, size and weight; nothing for a share of one corpus."""
        if not self.weights:
            return []
        facts = []
        for tokens, weight in zip(self.files, shares(self.weights), strict=True):
            size = {"documents": len(tokens), "tokens": int(tokens.tokens)}
            facts.append({"corpus": name_of(tokens), "weight": weight, **size})
        return facts


def name_of(tokens: TokenFile) -> str:
    """The name of a corpus in rows and logs."""
    return tokens.meta.get("corpus") or tokens.prefix.name


def open_parts(data: Data, names: Iterable[str] = PARTS) -> dict[str, Part]:
    """The parts that a configuration names, by name; a part without corpora is left out.

    UserError for a token file that is missing or damaged, and where no part of `names` has text.
    """
    if not any(getattr(data, f"{name}_data_paths") for name in PARTS):
        tokens = TokenFile.open(data.data_path or "")
        return {name: Part(name, (tokens,), data.split) for name in names}
    parts = {}
    for name in names:
        key = f"{name}_data_paths"
        if not getattr(data, key):
            continue
        try:
            files = tuple(TokenFile.open(path) for path in getattr(data, key))
        except UserError as fault:
            raise UserError(str(fault).replace("data_path:", f"{key}:", 1)) from None
        weights = getattr(data, f"{name}_data_weights") or (1.0,) * len(files)
        if data.weight_by_num_documents:
            documents = [len(tokens) for tokens in files]
            weights = weights_by_documents(documents, data.weighted_sampler_alpha)
        parts[name] = Part(name, files, WHOLE[name], tuple(weights))
    if not parts:
        missing = " and ".join(f"{name}_data_paths" for name in names)
        raise UserError(f"{missing}: not given - name the corpora to read")

    trained = {}  # the files of the training part, by the sums in their cards
    if "train" in parts:
        trained = {
            tokens.meta.get("sha256", {}).get("bin"): tokens for tokens in parts["train"].files
        }
    trained.pop(None, None)
    for name, part in parts.items():
        for tokens in part.files:
            known = trained.get(tokens.meta.get("sha256", {}).get("bin"))
            if name != "train" and known is not None:
                raise UserError(
                    f"{name}_data_paths: {tokens.prefix} has the same tokens as {known.prefix},"
                    " which is trained on, so a loss there says nothing of new text - prepare text"
                    " that is held out"
                )
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
        samples, number = self._place(index)
        return samples.read(samples.pieces(number))

    def _place(self, index: int) -> tuple[Samples, int]:
        """The corpus of a window, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        corpus, number = self.turns[index]
        return self.samples[corpus], number


class Turns:
    """Which corpus each window is of, and how many of that corpus came before.

    Window k is of the corpus with the largest max(k, 1) * weight - windows so far, in float64, the
    first of equals: build_blending_indices in GPT-NeoX's helpers.cpp. That loop needs the result of
    each window for the next, and the reference keeps 9 bytes of each. Here only the counts at every
    BLOCK windows are kept, and a block is computed when it is asked for.
    """

    def __init__(self, weights: Sequence[float]):
        self.weights = np.array(shares(weights))
        self.weights /= self.weights.sum()  # a second time, as the reference does
        self._starts = np.zeros((1, len(weights)), dtype=np.int64)  # counts before each block
        self._block = -1  # the one that is kept
        self._turns: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        block, place = divmod(index, BLOCK)
        if block == self._block:
            return self._turns[place]
        weights = self.weights.tolist()
        counts = self._before(block).tolist()
        turns = []
        for window in range(block * BLOCK, (block + 1) * BLOCK):
            windows = float(max(window, 1))
            lags = [weight * windows - count for weight, count in zip(weights, counts, strict=True)]
            corpus = lags.index(max(lags))
            turns.append((corpus, counts[corpus]))
            counts[corpus] += 1
        self._turns, self._block = turns, block
        return turns[place]

    def _before(self, block: int) -> NDArray[np.int64]:
        """[corpora]: windows of each corpus before a block."""
        while len(self._starts) <= block:
            missing = block + 1 - len(self._starts)
            blocks = min(max(missing, LEAST), MOST)
            after = _counts_after(self.weights, len(self._starts) - 1, blocks, self._starts[-1])
            self._starts = np.concatenate([self._starts, after])
        return self._starts[block]


def _counts_after(
    weights: NDArray[np.float64], first: int, blocks: int, counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[blocks, corpora]: windows of each corpus after each of so many blocks from `first` on.

    counts: those before the first block.
    All blocks are computed at once, each from a guess of the counts before it, and then again those
    whose guess is not what the block before ended with, until all agree. The loop forgets its start
    within a few windows, so the second time is nearly always the last.
    """
    windows = np.arange(first, first + blocks) * BLOCK

    # The guess: whole numbers near the shares of so many windows, which they add up to.
    ideal = weights * windows[:, None]
    before = np.floor(ideal).astype(np.int64)
    missing = windows - before.sum(axis=1)
    largest_first = np.argsort(before - ideal, axis=1, kind="stable")
    before += np.argsort(largest_first, axis=1, kind="stable") < missing[:, None]
    before[0] = counts

    after = np.empty_like(before)
    wrong = np.ones(blocks, dtype=bool)
    while wrong.any():
        so_far = before[wrong]
        rows = np.arange(len(so_far))
        for step in range(BLOCK):
            lags = weights * np.maximum(windows[wrong] + step, 1)[:, None] - so_far
            so_far[rows, lags.argmax(axis=1)] += 1
        after[wrong] = so_far
        wrong[1:] = (before[1:] != after[:-1]).any(axis=1)
        wrong[0] = False
        before[1:] = after[:-1]
    return after


def shares(weights: Sequence[float]) -> list[float]:
    """The weights, divided by their sum."""
    whole = sum(weights)
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
    raised = shares([part**alpha for part in parts])
    return shares([power * (1 - part) for power, part in zip(raised, parts, strict=True)])
