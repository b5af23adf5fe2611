"""The text of a run: batches for each step and validation, and the documents they come from."""

import time
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from megatron.config import Config
from megatron.data.loader import batches
from megatron.data.parts import Blend, Part
from megatron.data.samples import Samples
from megatron.errors import UserError
from megatron.parallel.grid import Grid

NAMED = 8  # samples or documents of a rank that a message lists
WAIT_FOR_REPORT = 1.0  # seconds
LOST_WORKER = "DataLoader worker"  # how torch's message begins


class Text:
    """Windows of the training and the validation text for this rank.

    parts: train, and valid where the run validates
    used: windows that all ranks together have used for training
    UserError where the data do not suffice.
    """

    def __init__(
        self, config: Config, grid: Grid, parts: Mapping[str, Part], used: int = 0
    ) -> None:
        self.config, self.grid, self.parts = config, grid, parts
        self.used = used
        training = config.training
        self.micro_batch = training.train_micro_batch_size_per_gpu
        self.accumulated = training.gradient_accumulation_steps
        self.windows_per_step = self.micro_batch * self.accumulated * grid.ranks
        self.samples = self._training_samples()
        self.train_windows = self._batches(self.samples, used)

    def next_step(self) -> list[Tensor]:
        """The next step's batches of this rank: [micro_batch, length + 1] each."""
        try:
            micro_batches = [next(self.train_windows) for _ in range(self.accumulated)]
        except (OSError, EOFError):
            # The connection to a worker breaks a moment before torch reports which one was lost.
            time.sleep(WAIT_FOR_REPORT)
            raise
        self.used += self.windows_per_step
        return micro_batches

    def validation(self) -> Iterator[Tensor]:
        """Batches [micro_batch, length + 1] of the valid part, the same at each call."""
        length = self.config.data.seq_length_val
        batch = self.micro_batch * self.grid.ranks
        windows = self.config.training.eval_iters * batch
        seed = self.config.training.seed
        return self._batches(self.parts["valid"].samples(length, seed, windows))

    def windows_of(self, used: int, rank: int) -> list[int]:
        """The samples of one rank in the step before which `used` windows had been used."""
        count = len(self.samples)
        windows = []
        for part in range(self.accumulated):
            first = used + (part * self.grid.ranks + rank) * self.micro_batch
            windows += [index % count for index in range(first, first + self.micro_batch)]
        return windows

    def documents_of(self, windows: Sequence[int]) -> list[int] | list[str]:
        """The documents that these samples were cut from, by their numbers in the token file.

        In a blend each is named with its token file, as in `github_text_document:12`.
        """
        documents = set()
        for window in windows:
            documents |= set(self.samples.documents_of(window))
        return sorted(documents)

    def _training_samples(self) -> Samples | Blend:
        training = self.config.training
        part, length = self.parts["train"], self.config.model.seq_length
        if training.train_epochs is not None:
            return part.epoch(length, training.seed)
        return part.samples(length, training.seed, training.train_iters * self.windows_per_step)

    def _batches(self, samples: Samples | Blend, used: int = 0) -> Iterator[Tensor]:
        return batches(
            samples,
            self.micro_batch,
            rank=self.grid.rank,
            ranks=self.grid.ranks,
            start=used,
            repeat=True,
            num_workers=self.config.data.num_workers,
            pin_memory=self.grid.device.type == "cuda",
        )


def listed(numbers: Sequence[object]) -> str:
    """`3, 5, 8`, and how many more there are."""
    words = [str(number) for number in numbers[:NAMED]]
    more = len(numbers) - NAMED
    if more > 0:
        words.append(f"and {more} more")
    return ", ".join(words)


def lost_worker(fault: RuntimeError) -> UserError | None:
    """The message about a lost process of num_workers; None where the fault is another one."""
    first_line = str(fault).splitlines()[0] if str(fault) else ""
    if not first_line.startswith(LOST_WORKER):
        return None
    return UserError(
        f"data: a process that reads samples was lost ({first_line})"
        " - start the same command again, with num_workers: 0 if it happens again"
    )
