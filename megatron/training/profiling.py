"""Traces of single steps, and snapshots of CUDA memory, written by key into the run's folder.

A fault of a recorder is a warning, and the training goes on without it.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron.config.schema import Logging
from megatron.errors import in_words
from megatron.files import atomic_write, write_text
from megatron.parallel.grid import Grid

logger = logging.getLogger(__name__)

FOLDER = "profile"
OPERATIONS = 40  # lines of the table beside a trace
EVENTS = 100_000  # allocations and frees that a snapshot remembers, as in GPT-NeoX


class Recorder(Protocol):
    """Something that is switched on for some steps. key: of the configuration, for messages."""

    key: str

    def begin(self, step: int) -> None: ...
    def end(self, step: int) -> None: ...
    def close(self) -> None: ...


class Trace:
    """torch's profiler over the steps first to last; the step before them warms it up.

    Writes folder/step{first}-{last}_rank{rank}.trace.json.gz, a Chrome trace that Perfetto opens,
    and a table of the longest operations, .txt.
    """

    key = "profile"

    def __init__(self, folder: Path, first: int, last: int, grid: Grid, *, memory: bool) -> None:
        self.folder, self.first, self.last, self.grid = folder, first, last, grid
        self.memory = memory
        self.profiler: profile | None = None
        self.recorded: list[int] = []

    def begin(self, step: int) -> None:
        """Start with the step before the first one, or within them in a run that begins there."""
        if self.profiler is not None or not self.first - 1 <= step <= self.last:
            return
        warm_up = 1 if step < self.first else 0
        activities = [ProfilerActivity.CPU]
        if self.grid.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        active = self.last - step + 1 - warm_up
        with _quiet():
            self.profiler = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=warm_up, active=active, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
                profile_memory=self.memory,
            )
            self.profiler.start()

    def end(self, step: int) -> None:
        """One more step is recorded; the last one writes the files."""
        if self.profiler is None:
            return
        if step >= self.first:
            self.recorded.append(step)
        if step == self.last:
            self.close()
        else:
            self.profiler.step()

    def close(self) -> None:
        """Write what was recorded, which a run that ends early cuts short."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            with _quiet():
                profiler.stop()

    def _write(self, profiler: profile) -> None:
        if not self.recorded:
            return
        steps = f"step{self.recorded[0]}-{self.recorded[-1]}"
        path = self.folder / f"{steps}_rank{self.grid.rank}.trace.json.gz"
        with atomic_write(path) as temporary:
            # The ending says that it is to be packed.
            plain = temporary.with_name(f"{temporary.name}.json.gz")
            profiler.export_chrome_trace(str(plain))
            plain.replace(temporary)
        order = "self_cpu_time_total"
        if self.grid.device.type == "cuda":
            order = "self_cuda_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=OPERATIONS)
        write_text(self.folder / f"{steps}_rank{self.grid.rank}.txt", table + "\n")
        logger.info(f"profile: {steps} is in {path}, for https://ui.perfetto.dev")


class MemoryHistory:
    """What asked for CUDA memory from the start of the run to the end of step `last`.

    Writes folder/memory_rank{rank}.pickle, for https://pytorch.org/memory_viz. A run that ends
    earlier, also by a lack of memory, writes what there is.
    """

    key = "memory_profiling"

    def __init__(self, folder: Path, last: int, grid: Grid) -> None:
        self.path = folder / f"memory_rank{grid.rank}.pickle"
        self.last = last
        torch.cuda.memory._record_memory_history(max_entries=EVENTS)
        self.records = True

    def begin(self, step: int) -> None:
        """It records from the start."""

    def end(self, step: int) -> None:
        if step >= self.last:
            self.close()

    def close(self) -> None:
        if not self.records:
            return
        self.records = False
        try:
            with atomic_write(self.path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info(f"memory_profiling: {self.path}, for https://pytorch.org/memory_viz")


class Profiling:
    """What the keys `profile` and `memory_profiling` ask for, on the ranks of `profile_ranks`.

    settings: the section `logging`; folder: of the run, None where it has none;
    done: steps before this start; steps: the last step of the training
    """

    def __init__(
        self, settings: Logging, folder: Path | None, grid: Grid, *, done: int, steps: int
    ) -> None:
        self.settings, self.folder, self.grid = settings, folder, grid
        self.done, self.steps = done, steps
        self.recorders: list[Recorder] = []

    def __enter__(self) -> Self:
        settings = self.settings
        if not settings.profile and not settings.memory_profiling:
            return self
        if self.grid.rank not in settings.profile_ranks:
            return self
        reason = self._why_not()
        if reason is not None:
            key = "profile" if settings.profile else "memory_profiling"
            logger.warning(f"{key}: nothing is recorded, because {reason}")
            return self
        self.recorders = self._recorders()
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is recorded so far, also where the training failed."""
        self._each(lambda recorder: recorder.close())
        self.recorders = []

    @property
    def writes(self) -> bool:
        """Whether something is recorded, so that the end of a step may take time."""
        return bool(self.recorders)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step of the training, which is recorded where its number is wanted."""
        if not self.recorders:
            yield
            return
        self._each(lambda recorder: recorder.begin(number))
        with record_function(f"training step {number}"):
            yield

    def after(self, number: int) -> None:
        """Write what is complete with this step."""
        self._each(lambda recorder: recorder.end(number))
        if number >= self.settings.profile_step_stop:
            self.recorders = []

    def _why_not(self) -> str | None:
        first, last = self.settings.profile_step_start, self.settings.profile_step_stop
        if self.folder is None and not self.settings.memory_profiling_path:
            return "neither save nor log_dir is set"
        if self.done >= last:
            return f"the run goes on after step {self.done}, and profile_step_stop is {last}"
        if self.steps < first:
            return f"the run ends at step {self.steps}, and profile_step_start is {first}"
        return None

    def _recorders(self) -> list[Recorder]:
        settings, grid = self.settings, self.grid
        first, last = settings.profile_step_start, settings.profile_step_stop
        place_of_memory = settings.memory_profiling_path
        folder = Path(place_of_memory or "") if self.folder is None else self.folder / FOLDER
        recorders: list[Recorder] = []
        if settings.profile:
            memory = settings.memory_profiling
            recorders.append(Trace(folder, first, last, grid, memory=memory))
        if not settings.memory_profiling:
            return recorders
        if grid.device.type != "cuda":
            logger.warning(
                "memory_profiling: snapshots exist for CUDA alone - with profile: true the trace"
                " shows what each operation allocates on the CPU"
            )
            return recorders
        try:
            place = Path(place_of_memory) if place_of_memory else folder
            recorders.append(MemoryHistory(place, last, grid))
        except Exception as fault:  # whatever a driver or another version of torch may raise
            _warn("memory_profiling", fault)
        return recorders

    def _each(self, act: Callable[[Recorder], None]) -> None:
        for recorder in list(self.recorders):
            try:
                act(recorder)
            except Exception as fault:  # whatever a profiler, a driver or a disk may raise
                self.recorders.remove(recorder)
                _warn(recorder.key, fault)


def _warn(key: str, fault: Exception) -> None:
    logger.warning(f"{key}: failed ({in_words(fault)}) - training goes on without it")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice about schedules, which a resumed or stopped run cannot follow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*([Pp]rofiler|schedule)")
        yield
