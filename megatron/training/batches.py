"""The text of a training run: its vocabulary, and the batches of each step."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from megatron.config import Config
from megatron.data.loader import Indexable, batches
from megatron.data.parts import Part, open_parts
from megatron.data.tokenizers.build import build_tokenizer, needs_files
from megatron.data.tokenizers.tokenizer import description
from megatron.errors import UserError
from megatron.model import padded_vocab
from megatron.parallel.grid import Grid

VOCAB = 50257  # GPT-2's


def open_text(config: Config) -> tuple[dict[str, Part], dict[str, Any]]:
    """The parts `train` and, if the run validates, `valid`; and the facts that a checkpoint stores.

    The facts are vocab (rows of the embedding), tokenizer {type, hash, vocab_size, eod}, corpus and
    corpora, those of both parts. Raises UserError if the token files and the configured tokenizer
    disagree, if neither gives the vocabulary, or if a key needs end-of-document tokens and the text
    has none.
    """
    names = ["train"]
    if config.training.validation_interval:
        names.append("valid")
    parts = open_parts(config.data, names)
    files = [tokens for part in parts.values() for tokens in part.files]
    data = config.data
    tokenizer, built = files[0].meta.get("tokenizer"), None
    if data.vocab_file or not needs_files(data.tokenizer_type):
        built = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        tokenizer = description(built)
        for tokens in files:
            tokens.check_tokenizer(built)
    if tokenizer is None:
        raise UserError(
            f"vocab_file: is not set, and there is no {files[0].prefix}.json that names the"
            " tokenizer - set tokenizer_type, vocab_file and merge_file to the tokenizer that"
            " wrote the data"
        )
    for tokens in files:
        other = tokens.meta.get("tokenizer", tokenizer)
        if built is None and other.get("hash") != tokenizer.get("hash"):
            raise UserError(
                f"{tokens.prefix}: was not written by the same tokenizer as {files[0].prefix} -"
                " prepare all corpora of a run with one tokenizer"
            )
        for key in ("reset_attention_mask", "eod_mask_loss"):
            if config[key]:
                tokens.check_ends(key, tokenizer.get("eod"))
    vocab = padded_vocab(tokenizer["vocab_size"], config.model.make_vocab_size_divisible_by)
    facts: dict[str, Any] = {"vocab": vocab, "tokenizer": tokenizer}
    train = parts["train"]
    facts["corpus"] = train.files[0].meta.get("corpus")
    if train.weights:
        names = [f"{corpus['corpus']} {corpus['weight']:.3g}" for corpus in train.facts()]
        facts["corpus"] = ", ".join(names)
    facts["corpora"] = [corpus for part in parts.values() for corpus in part.facts()]
    return parts, facts


def likely_rows(config: Config) -> int:
    """Rows of the embedding: from the data if they exist here, else GPT-2's."""
    size = VOCAB
    with suppress(UserError):
        tokens = open_parts(config.data, ["train"])["train"].files[0]
        size = tokens.meta.get("tokenizer", {}).get("vocab_size", VOCAB)
    return padded_vocab(size, config.model.make_vocab_size_divisible_by)


def windows_per_step(config: Config) -> int:
    """Windows per rank in an optimizer step."""
    training = config.training
    return training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps


def length_of_step(config: Config, step: int) -> int:
    """Tokens per window at a step (the first step is 1)."""
    stage = config.training.stage_of(step)
    length = None if stage is None else stage.seq_length
    return length or config.model.seq_length


class Batches:
    """This rank's windows of the training and validation text.

    parts: train, and valid if the run validates
    used: windows that all ranks together have already used for training
    planned: number of windows for which the order was drawn
    Raises UserError if there is not enough data.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        parts: Mapping[str, Part],
        used: int = 0,
        planned: int = 0,
    ) -> None:
        self.config, self.grid, self.parts, self.used = config, grid, parts, used
        training, length = config.training, config.model.seq_length
        self.per_step = windows_per_step(config) * grid.data_ranks
        self.planned = max(planned, training.train_iters * self.per_step)
        samples = parts["train"].samples(length, training.seed, self.planned)
        self.train_windows = self._batches(samples, used)

    def record(self) -> dict[str, int]:
        """Entries of checkpoint.json."""
        windows = {"windows": self.used, "windows_per_step": self.per_step}
        return {**windows, "planned": self.planned}

    def next_step(self, length: int) -> list[Tensor]:
        """The next step's batches of this rank: [micro_batch, seq_length + 1] each.

        Windows are cut into pieces of a shorter `length`: the last target of a piece is the first
        input of the next one, so inputs and targets stay the same.
        [micro_batch * seq_length / length, length + 1]
        """
        accumulated = self.config.training.gradient_accumulation_steps
        micro_batches = [next(self.train_windows) for _ in range(accumulated)]
        self.used += self.per_step
        if length == self.config.model.seq_length:
            return micro_batches
        return [batch.unfold(1, length + 1, length).flatten(0, 1) for batch in micro_batches]

    def validation(self) -> Iterator[Tensor]:
        """Batches [micro_batch, length + 1] of the valid part, the same at each call."""
        training, length = self.config.training, self.config.data.seq_length_val
        windows = (
            training.eval_iters * training.train_micro_batch_size_per_gpu * self.grid.data_ranks
        )
        return self._batches(self.parts["valid"].samples(length, training.seed, windows))

    def _batches(self, samples: Indexable, used: int = 0) -> Iterator[Tensor]:
        return batches(
            samples,
            self.config.training.train_micro_batch_size_per_gpu,
            rank=self.grid.data_rank,
            ranks=self.grid.data_ranks,
            start=used,
            repeat=True,
            num_workers=self.config.data.num_workers,
            pin_memory=self.grid.device.type == "cuda",
        )
