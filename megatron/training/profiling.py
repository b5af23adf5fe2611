"""Traces of single steps, and snapshots of CUDA memory, written by key into the run's folder.

A fault of torch's profiler or of a disk is a warning, and the training goes on without it.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch.profiler import profile, record_function, schedule

from megatron.config.schema import Logging
from megatron.errors import in_words
from megatron.files import atomic_write
from megatron.parallel.grid import Grid

logger = logging.getLogger(__name__)

EVENTS = 100_000  # allocations and frees that a snapshot remembers, as in GPT-NeoX


class Profiling:
    """Traces (`profile`) and snapshots (`memory_profiling`), on the ranks of `profile_ranks`.

    settings: the section `logging`; folder: of the run, or None; done: steps before this start

    Writes profile/step{first}-{last}_rank{rank}.trace.json.gz, a Chrome trace that Perfetto opens,
    and on CUDA memory_rank{rank}.pickle for https://pytorch.org/memory_viz. A run that ends
    earlier, also by a lack of memory, writes what there is.
    """

    def __init__(self, settings: Logging, folder: Path | None, grid: Grid, *, done: int) -> None:
        self.settings, self.grid = settings, grid
        self.place = (folder or Path()) / "profile"
        self.done = self.step_now = done
        self.first = max(settings.profile_step_start, done + 1)
        self.last = settings.profile_step_stop
        self.profiler: profile | None = None
        self.records_memory = False

    def __enter__(self) -> Self:
        settings, cuda = self.settings, self.grid.device.type == "cuda"
        records = settings.profile or settings.memory_profiling
        if not records or self.grid.rank not in settings.profile_ranks:
            return self
        if self.first > self.last:
            logger.warning(f"profile: nothing is recorded, as step {self.last} has been")
            return self
        if settings.memory_profiling and not cuda:
            logger.warning(
                "memory_profiling: snapshots exist for CUDA alone - with profile: true the trace"
                " shows what each operation allocates on the CPU"
            )
        with self._spared():
            if settings.memory_profiling and cuda:
                torch.cuda.memory._record_memory_history(max_entries=EVENTS)
                self.records_memory = True
            if settings.profile:
                before = self.first - 1 - self.done  # steps that are not written
                warm_up = min(1, before)
                steps = schedule(
                    wait=before - warm_up,
                    warmup=warm_up,
                    active=self.last - self.first + 1,
                    repeat=1,
                )
                self.profiler = profile(
                    schedule=steps,
                    record_shapes=True,
                    profile_memory=settings.memory_profiling,
                )
                self.profiler.start()
        return self

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step of the training, which is recorded if its number is wanted."""
        with record_function(f"training step {number}"):
            yield
        self.step_now = number
        if number >= self.last:
            self.__exit__()
        elif self.profiler is not None:
            with self._spared():
                self.profiler.step()

    def __exit__(self, *_: object) -> None:
        """Write what is recorded so far, also if the training failed."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            with self._spared():
                profiler.stop()
                if self.step_now >= self.first:
                    name = f"step{self.first}-{self.step_now}_rank{self.grid.rank}.trace.json.gz"
                    path = self.place / name
                    with atomic_write(path) as temporary:
                        # The ending says that it is to be packed.
                        packed = temporary.with_name(f"{temporary.name}.json.gz")
                        profiler.export_chrome_trace(str(packed))
                        packed.replace(temporary)
                    logger.info(f"profile: {path}, for https://ui.perfetto.dev")
        if self.records_memory:
            self.records_memory = False
            folder = Path(self.settings.memory_profiling_path or self.place)
            path = folder / f"memory_rank{self.grid.rank}.pickle"
            with self._spared(), atomic_write(path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Make a fault a warning, and leave out torch's advice about schedules."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*([Pp]rofiler|schedule)")
                yield
        except Exception as fault:  # whatever a profiler, a driver or a disk may raise
            self.profiler = None
            logger.warning(f"profile: failed ({in_words(fault)}) - training goes on without it")
