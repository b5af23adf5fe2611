"""Do what is missing of a sweep, one process per device."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from filelock import Timeout

from megatron.checkpoints.saved import keep_weights_only
from megatron.errors import UserError, visible
from megatron.files import ROOT, write_text
from megatron.parallel.die_with_parent import die_with_parent
from megatron.sweeps.cells import Cell, Sweep, state_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAUSE = 0.1  # seconds between two looks at the processes


def places_of(jobs: int | None) -> list[dict[str, str]]:
    """Variables for the environment of each of `jobs` runs at a time; default: one per GPU."""
    count = torch.cuda.device_count()
    places: list[dict[str, str]] = [{} for _ in range(jobs or count or 1)]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(count)]
    # A script chooses its threads by itself, but runs that start together do not notice each other.
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
    """Works on cells, one at each place at a time.

    places: what the environment of the processes of each place says
    say: shows a line
    stopping: whether a signal has come
    disk_full: whether a cell failed for that: then no other is begun
    """

    places: Sequence[dict[str, str]]
    say: Callable[[str], None]
    stopping: bool = False
    disk_full: bool = False

    def run(self, sweep: Sweep) -> None:
        """Until nothing is left to begin; after a signal, until running cells have saved."""
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = list(SIGNALS)
        if under_nohup:
            caught.remove(signal.SIGHUP)
        handlers_before = {number: signal.signal(number, self._stop) for number in caught}
        waiting = iter(sweep.cells)
        running: dict[Iterator[subprocess.Popen], subprocess.Popen | None] = {}
        for place in self.places:
            running[self._work(waiting, place)] = None
        terminated: set[subprocess.Popen] = set()
        try:
            while running:
                for worker, process in list(running.items()):
                    if process is None or process.poll() is not None:
                        running[worker] = next(worker, None)
                        if running[worker] is None:
                            del running[worker]
                    elif self.stopping and process not in terminated:
                        # Each once: a second ctrl-C would end train.py without saving.
                        terminated.add(process)
                        process.terminate()
                time.sleep(PAUSE)
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True
        name = signal.Signals(number).name
        self._tell(f"{name}: what runs saves a checkpoint and ends; the same command continues")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            self.say(text)

    def _work(self, waiting: Iterator[Cell], place: dict[str, str]) -> Iterator[subprocess.Popen]:
        """Work on waiting cells, one after another; yields each process, to go on at its end."""
        for cell in waiting:
            if self.stopping or self.disk_full:
                return
            try:
                cell.folder.mkdir(parents=True, exist_ok=True)
                with cell.lock:
                    yield from self._do(cell, place)
            except Timeout:
                self._tell(f"{cell.name}: another process is at work on it")
            except (UserError, OSError) as fault:
                # A damaged file or a full disk: the other cells go on.
                self._fail(cell, str(fault))

    def _do(self, cell: Cell, place: dict[str, str]) -> Iterator[subprocess.Popen]:
        """Train a cell and evaluate it, as far as that is missing."""
        state = state_of(cell)
        if state.kind == "done":
            return
        if state.kind in ("foreign", "damaged"):
            raise UserError(f"{state.note} - move it away, or give another --folder")
        (cell.folder / "failure.txt").unlink(missing_ok=True)
        settings = cell.folder / "cell.yml"
        cell.config.save(settings)
        if state.step < cell.steps:
            command = ["train.py", str(settings)]
            ended_well = yield from self._call(cell, command, place)
            if not ended_well:
                return
            if state_of(cell).step < cell.steps:  # only then may the optimizer's state go
                raise UserError("training ended early, as exit_interval or exit_duration says")
        keep_weights_only(cell.folder)
        for evaluation in state.missing:
            unfinished = cell.file(evaluation, finished=False)
            words = ["--step", str(cell.steps), "--output", str(unfinished)]
            command = ["evaluate.py", str(settings), *evaluation.words, *words]
            ended_well = yield from self._call(cell, command, place)
            if not ended_well:
                return
            os.replace(unfinished, cell.file(evaluation))
        self._tell(f"{cell.name}: done")

    def _call(
        self, cell: Cell, words: list[str], place: dict[str, str]
    ) -> Generator[subprocess.Popen, None, bool]:
        """Whether one of our scripts ended well. It ends with the sweep, however that ends."""
        if self.stopping:
            return False
        device = place.get("CUDA_VISIBLE_DEVICES")
        where = "" if device is None else f" on device {device}"
        self._tell(f"{cell.name}: {words[0]}{where}")
        log = cell.folder / "sweep.log"
        command = die_with_parent([sys.executable, str(ROOT / words[0]), *words[1:]])
        with log.open("ab") as output:
            start = output.tell()
            # In a group of its own: what a terminal signals, it gets once, by `run`.
            process = subprocess.Popen(
                command,
                env={**os.environ, **place},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        yield process
        status = process.returncode
        if status and not self.stopping:
            text = log.read_bytes()[start:].decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            reason = visible(lines[-1]) if lines else f"{words[0]} ended with status {status}"
            if status < 0:
                reason = f"killed by {signal.Signals(-status).name}; {reason}"
            self._fail(cell, reason)
        return status == 0

    def _fail(self, cell: Cell, note: str) -> None:
        self.disk_full |= os.strerror(errno.ENOSPC) in note
        with contextlib.suppress(OSError):  # a full disk; the next line says it
            write_text(cell.folder / "failure.txt", note + "\n")
        self._tell(f"{cell.name}: failed: {note} (all of it: {cell.folder / 'sweep.log'})")
