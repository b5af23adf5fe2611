"""Run what is missing of a sweep, one process per device."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from filelock import Timeout

from megatron.checkpoints.saved import keep_weights_only
from megatron.errors import UserError
from megatron.files import ROOT, write_text
from megatron.parallel.die_with_parent import die_with_parent
from megatron.parallel.grid import free_port
from megatron.parallel.launcher import environments
from megatron.sweeps.cells import Cell, is_trained, state_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A cluster may send these to all processes of a job; then a script ends early but successfully.
OF_CLUSTERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PAUSE = 0.1  # seconds between two checks of a process


def places_of(jobs: int | None) -> list[dict[str, str]]:
    """Environment variables for each of `jobs` simultaneous runs; default: one per GPU."""
    count = torch.cuda.device_count()
    places: list[dict[str, str]] = [{} for _ in range(jobs or count or 1)]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(count)]
    # A script chooses its own threads, but runs that start together don't notice each other.
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // len(places))))
    for number, place in enumerate(places):
        if count:
            place["CUDA_VISIBLE_DEVICES"] = names[number % count]
        if len(places) > 1:
            place["OMP_NUM_THREADS"] = threads
    return places


@dataclass
class Runner:
    """Works on cells, one at a time at each place.

    say: prints a line
    patience: seconds to wait for a cell's owner to end
    starter: the command that starts a script in several processes
    stopping: the first signal that arrived, 0 for none
    """

    say: Callable[[str], None]
    patience: float = 0.2
    starter: tuple[str, ...] = ()
    stopping: int = 0

    def work(self, cell: Cell, place: dict[str, str]) -> None:
        """Train a cell and evaluate it, unless that is already done.

        The scripts end with this process, however it ends. The calling thread must live as long.
        place: environment variables for the scripts
        """
        if self.stopping:
            return
        try:
            cell.folder.mkdir(parents=True, exist_ok=True)
            with cell.lock.acquire(self.patience, cancel_check=lambda: self.stopping > 0):
                state = state_of(cell)
                if state.kind == "done":
                    return
                if state.kind == "damaged":
                    raise UserError(f"{state.note} - move it elsewhere, or choose another --folder")
                (cell.folder / "failure.txt").unlink(missing_ok=True)
                settings = cell.folder / "cell.yml"
                cell.config.save(settings)
                if not is_trained(cell, state.step):
                    if not self._ended_well(cell, ["train.py", str(settings)], place):
                        return
                    if state_of(cell).step < cell.steps:  # the optimizer's state must be kept
                        raise UserError(
                            "training ended early because of exit_interval or exit_duration"
                        )
                keep_weights_only(cell.folder)
                for evaluation in state.missing:
                    unfinished = cell.file(evaluation, finished=False)
                    words = ["--step", str(cell.steps), "--output", str(unfinished)]
                    command = ["evaluate.py", str(settings), *evaluation.words, *words]
                    if not self._ended_well(cell, command, place):
                        return
                    os.replace(unfinished, cell.file(evaluation))
                self._tell(f"{cell.name}: done")
        except Timeout:
            self._tell(f"{cell.name}: another process is working on it")
        except (UserError, OSError) as fault:
            # A damaged file, a failed script, a full disk: the caller continues.
            with contextlib.suppress(OSError):  # a full disk; the next line says so
                write_text(cell.folder / "failure.txt", f"{fault}\n")
            self._tell(f"{cell.name}: failed: {fault} (full log: {cell.folder / 'sweep.log'})")

    def _ended_well(self, cell: Cell, words: list[str], place: dict[str, str]) -> bool:
        """Run one of our scripts; False if it was stopped. Raises UserError if it failed."""
        if self.stopping:
            return False
        self._tell(f"{cell.name}: {words[0]}")
        log = cell.folder / "sweep.log"
        script = [*self.starter, sys.executable, str(ROOT / words[0]), *words[1:]]
        environment = {**os.environ, **place}
        if not self.starter:
            environment = environments(environment, 1, free_port())[0]
        with log.open("ab") as output:
            start = output.tell()
            # In its own process group, so that it gets a terminal's signal only once, from here.
            process = subprocess.Popen(
                die_with_parent(script),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        terminated = False
        while process.poll() is None:
            if self.stopping and not terminated:
                # Only once: a second ctrl-C would end train.py without saving.
                # srun forwards SIGUSR1, but at SIGTERM it kills its processes.
                process.send_signal(signal.SIGUSR1 if self.starter else signal.SIGTERM)
                terminated = True
            time.sleep(PAUSE)
        status = process.returncode
        ended_by = -status if status < 0 else status - 128
        if status and not self.stopping and ended_by not in OF_CLUSTERS:
            text = log.read_bytes()[start:].decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
            raise UserError(f"{words[0]} ended with {status}: {' '.join(lines[-1:])}")
        return status == 0

    def run(self, cells: Sequence[Cell], places: Sequence[dict[str, str]]) -> None:
        """Work until nothing is left to start; after a signal, until running cells have saved."""
        free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for place in places:
            free.put(place)

        def work_somewhere(cell: Cell) -> None:
            place = free.get()
            try:
                self.work(cell, place)
            finally:
                free.put(place)

        with self.stoppable(*SIGNALS), ThreadPoolExecutor(len(places)) as pool:
            list(pool.map(work_somewhere, cells))  # raises an exception of the thread

    @contextlib.contextmanager
    def stoppable(self, *numbers: signal.Signals) -> Iterator[None]:
        """In this block these signals only request a stop."""
        caught = list(numbers)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
            caught.remove(signal.SIGHUP)
        handlers_before = {number: signal.signal(number, self._stop) for number in caught}
        try:
            yield
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = self.stopping or number
        name = signal.Signals(number).name
        self._tell(f"{name}: running cells save a checkpoint and end; the same command continues")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self.say(text)
