"""Traces of single steps by torch's profiler, written by key into the run's folder.

A fault of the profiler or of a disk is a warning, and the training goes on without it.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch.profiler import profile, record_function, schedule

from megatron.config.schema import Logging
from megatron.errors import in_words
from megatron.files import atomic_write
from megatron.parallel.grid import Grid

logger = logging.getLogger(__name__)


class Profiling:
    """The trace of a rank of `profile_ranks`, with the memory that each operation allocates.

    settings: the section `logging`; folder: of the run, or None; done: steps before this start

    Writes profile/step{first}-{last}_rank{rank}.trace.json.gz, a Chrome trace that Perfetto opens.
    A run that ends earlier writes the steps that it recorded.
    """

    def __init__(self, settings: Logging, folder: Path | None, grid: Grid, *, done: int) -> None:
        self.place, self.rank = (folder or Path()) / "profile", grid.rank
        self.last_step = done
        self.first = max(settings.profile_step_start, done + 1)
        self.profiler: profile | None = None
        if not settings.profile or grid.rank not in settings.profile_ranks:
            return
        last = settings.profile_step_stop
        if self.first > last:
            logger.warning(f"profile: nothing is recorded, as step {last} has been")
            return
        before = self.first - 1 - done  # steps that are not written
        warm_up = min(1, before)
        active = last - self.first + 1
        with _quiet():
            steps = schedule(wait=before - warm_up, warmup=warm_up, active=active, repeat=1)
            self.profiler = profile(
                schedule=steps, on_trace_ready=self._write, record_shapes=True, profile_memory=True
            )

    def __enter__(self) -> Self:
        self._do("start")
        return self

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step of the training."""
        with record_function(f"training step {number}"):
            yield
        self.last_step = number
        self._do("step")

    def __exit__(self, *_: object) -> None:
        self._do("stop")

    def _write(self, profiler: profile) -> None:
        name = f"step{self.first}-{self.last_step}_rank{self.rank}.trace.json.gz"
        path = self.place / name
        with atomic_write(path) as temporary:
            # The ending says that it is to be packed.
            packed = temporary.with_name(f"{temporary.name}.json.gz")
            profiler.export_chrome_trace(str(packed))
            packed.replace(temporary)
        logger.info(f"profile: {path}, for https://ui.perfetto.dev")

    def _do(self, action: str) -> None:
        if self.profiler is None:
            return
        try:
            with _quiet():
                getattr(self.profiler, action)()
        except Exception as fault:  # whatever a profiler, a driver or a disk may raise
            self.profiler = None
            logger.warning(f"profile: failed ({in_words(fault)}) - training goes on without it")


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out torch's advice about schedules."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*([Pp]rofiler|schedule)")
        yield
