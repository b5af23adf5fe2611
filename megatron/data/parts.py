"""The text of a part: a share of the documents of one corpus, or whole corpora that are blended."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.schema import Data
from megatron.data.blending import Blend, samples_of_each, shares, weights_by_documents
from megatron.data.samples import Samples, build_split, windows_of_an_epoch
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.splits import PARTS

log = logging.getLogger(__name__)

WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}  # the split that is all of a part


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

    def samples(self, length: int, seed: int, num_samples: int) -> Samples | Blend:
        """Windows for so many samples; UserError where there is no text."""
        if not self.weights:
            return self._of(self.files[0], length, seed, num_samples)
        counts = samples_of_each(self.weights, num_samples)
        if self.name == "train":
            self._log_repeated(counts, length)
        several = [
            self._of(tokens, length, seed, count)
            for tokens, count in zip(self.files, counts, strict=True)
        ]
        return Blend(several, self.weights)

    def epoch(self, length: int, seed: int) -> Samples | Blend:
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

    def _log_repeated(self, counts: Sequence[int], length: int) -> None:
        """Name the corpora of a blend whose weight is so large that they are read again."""
        for tokens, count in zip(self.files, counts, strict=True):
            passes = count * length / tokens.tokens
            if passes > 1:
                log.info(
                    "%s: %s is read %.1f times, its weight asks for %d samples of %d tokens",
                    *(self.name, name_of(tokens), passes, count, length),
                )

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
    """What rows and logs call a corpus."""
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
        paths = getattr(data, f"{name}_data_paths")
        if paths:
            files = _opened(f"{name}_data_paths", paths)
            parts[name] = Part(name, files, WHOLE[name], _weights(data, name, files))
    if not parts:
        missing = " and ".join(f"{name}_data_paths" for name in names)
        raise UserError(f"{missing}: not given - name the corpora to read")
    _check_other_text(parts)
    return parts


def _check_other_text(parts: dict[str, Part]) -> None:
    """UserError where held-out text is a copy of text that is trained on, by the sums in cards."""
    if "train" not in parts:
        return
    trained = {_sum(tokens): tokens.prefix for tokens in parts["train"].files}
    for name, part in parts.items():
        for tokens in part.files:
            known = trained.get(_sum(tokens))
            if name != "train" and _sum(tokens) is not None and known is not None:
                raise UserError(
                    f"{name}_data_paths: {tokens.prefix} has the same tokens as {known}, which is"
                    " trained on, so a loss there says nothing of new text - prepare text that is"
                    " held out"
                )


def _sum(tokens: TokenFile) -> str | None:
    return tokens.meta.get("sha256", {}).get("bin")


def _opened(key: str, paths: Sequence[str]) -> tuple[TokenFile, ...]:
    try:
        return tuple(TokenFile.open(path) for path in paths)
    except UserError as fault:
        raise UserError(str(fault).replace("data_path:", f"{key}:", 1)) from None


def _weights(data: Data, name: str, files: Sequence[TokenFile]) -> tuple[float, ...]:
    if data.weight_by_num_documents:
        documents = [len(tokens) for tokens in files]
        return tuple(weights_by_documents(documents, data.weighted_sampler_alpha))
    return getattr(data, f"{name}_data_weights") or (1.0,) * len(files)
