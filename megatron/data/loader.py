"""Batches of samples for each rank, from any starting point."""

import itertools
import logging
import multiprocessing
import multiprocessing.util
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron.errors import UserError

PREFETCH = 4  # batches that each worker reads ahead
log = logging.getLogger(__name__)


class Indexable(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> NDArray[np.int64]: ...


def batches(
    samples: Indexable,
    micro_batch: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    start: int = 0,
    repeat: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Tensor]:
    """Batches [micro_batch, length + 1] int64.

    A step uses micro_batch * ranks samples; rank r gets the r-th micro_batch of them.
    start: samples that all ranks together have already used;
    repeat: start over after the last whole step (which is logged) instead of ending there;
    num_workers: processes that read ahead; pin_memory: copies to CUDA need not wait for the host.
    Raises UserError if there is not one whole step.
    """
    count = len(samples)
    needed = 1 if repeat else micro_batch * ranks
    if count < needed:
        raise UserError(
            f"data: {count} samples are not enough for one step of {micro_batch} on each of {ranks}"
            " ranks - prepare more text, make train_micro_batch_size_per_gpu smaller, or samples"
            " shorter (seq_length)"
        )
    loader = DataLoader(
        _Batches(samples),
        batch_size=None,  # a batch of samples is one item
        sampler=_steps(count, micro_batch, rank, ranks, start, repeat),
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        # The loader draws a seed, which must not advance the run's random generator.
        generator=torch.Generator(),
    )
    before = set(multiprocessing.active_children())
    read_batches = iter(loader)  # start the workers now, not with the first batch
    workers = set(multiprocessing.active_children()) - before
    multiprocessing.util.Finalize(None, _kill, args=(workers,), exitpriority=1)
    return map(_or_fault, read_batches)


def _kill(workers: Iterable[BaseProcess]) -> None:
    """End the remaining workers when this process ends.

    Python would send them SIGTERM, which they ignore, and wait forever.
    """
    for worker in workers:
        if worker.is_alive():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
            worker.kill()


def _or_fault(batch: Tensor | UserError) -> Tensor:
    if isinstance(batch, UserError):
        raise batch
    return batch


class _Batches(Dataset):
    """Samples by the indices of a batch: [batch, length + 1] int64.

    A UserError is returned as a value: torch would add a worker's traceback to it.
    """

    def __init__(self, samples: Indexable) -> None:
        self.samples = samples

    def __getitem__(self, indices: list[int]) -> Tensor | UserError:
        try:
            batch = np.stack([self.samples[index] for index in indices])
        except UserError as fault:
            return fault
        return torch.from_numpy(batch).long()


def _ignore_signals(worker: int) -> None:
    """Ignore signals: ctrl-C and schedulers signal every process, but the training must still save.

    A worker ends together with the training process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _steps(
    count: int, micro_batch: int, rank: int, ranks: int, start: int, repeat: bool
) -> Iterator[list[int]]:
    """The indices of each step for one rank."""
    step = micro_batch * ranks
    for first in itertools.count(start, step):
        last = first + step - 1
        if last >= count and not repeat:
            return
        epoch_before = (first - 1) // count
        if last >= count and last // count > epoch_before:
            log.warning("all %d samples have been used, starting over", count)
        mine = first + rank * micro_batch
        yield [index % count for index in range(mine, mine + micro_batch)]
