"""Do what is missing of a sweep: one process per device, each cell locked while it is worked on."""

import contextlib
import errno
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.checkpoints.saved import keep_weights_only
from megatron.errors import UserError, visible
from megatron.files import ROOT, write_text
from megatron.parallel.tied import tied
from megatron.sweeps.lock import held
from megatron.sweeps.plan import Cell, Evaluation, Sweep
from megatron.sweeps.state import state_of

Say = Callable[[str], None]
FULL = 2**20  # bytes that are left: less than the files of a small run
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def places_of(jobs: int | None) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each of `jobs` runs at a time; by default one per GPU, or one."""
    count = torch.cuda.device_count()
    if not count:
        return [None] * (jobs or 1)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(count)]
    return [names[place % count] for place in range(jobs or count)]


def environment_at(place: str | None, places: int) -> dict[str, str]:
    """The environment of a script at one of several places."""
    environment = dict(os.environ)
    if places > 1:
        # A script chooses its threads by the load, but runs that start together do not notice
        # each other.
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // places)))
    if place is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place
    return environment


@dataclass
class Runner:
    """Works on cells from several threads, one for each place.

    places: CUDA_VISIBLE_DEVICES of the processes of each place; None leaves it as it is;
    failed: names of cells that did not end well; stopping: whether a signal has come
    disk_full: whether a cell failed for that: then no other is begun
    """

    places: Sequence[str | None]
    say: Say
    failed: list[str] = field(default_factory=list)
    stopping: bool = False
    disk_full: bool = False
    processes: set[subprocess.Popen] = field(default_factory=set)
    terminated: set[subprocess.Popen] = field(default_factory=set)

    def run(self, sweep: Sweep) -> None:
        """Until nothing is left to begin; after a signal, until running cells have saved."""
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in sweep.cells:
            waiting.put(cell)
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
        handlers_before = {number: signal.signal(number, self._stop) for number in caught}
        workers = [
            threading.Thread(target=self._work, args=(waiting, place, sweep.keep_states))
            for place in self.places
        ]
        try:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                if self.stopping:
                    self._terminate()
                for worker in workers:
                    worker.join(0.2)
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

    def _terminate(self) -> None:
        """Signal each process once: a second ctrl-C would end train.py without saving."""
        for process in list(self.processes - self.terminated):
            self.terminated.add(process)
            process.terminate()

    def _work(
        self, waiting: "queue.SimpleQueue[Cell]", place: str | None, keep_states: bool
    ) -> None:
        # Processes inherit this. A terminal signals all of them; each gets it once, by _terminate.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        while not (self.stopping or self.disk_full):
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._take(cell, place, keep_states)
            except (UserError, OSError) as fault:
                # A damaged file or a full disk: the other cells go on.
                self._fail(cell, str(fault))
            except BaseException as fault:  # as a user's own file may raise
                last = traceback.extract_tb(fault.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                self._fail(cell, f"internal error: {type(fault).__name__}: {fault} ({where})")

    def _take(self, cell: Cell, place: str | None, keep_states: bool) -> None:
        with held(cell.folder) as lock:
            if lock is None:
                self._tell(f"{cell.name}: another process is at work on it")
            else:
                self._do(cell, place, lock, keep_states)

    def _do(self, cell: Cell, place: str | None, lock: int, keep_states: bool) -> None:
        """Train a cell and evaluate it, as far as that is missing."""
        state = state_of(cell)
        if state.kind == "done":
            return
        if state.kind == "foreign":
            self._fail(cell, f"{state.note} - move it away, or give another --folder")
            return
        if state.kind == "damaged":
            self._fail(cell, state.note)
            return
        (cell.folder / "failure.txt").unlink(missing_ok=True)
        settings = cell.folder / "cell.yml"
        cell.config.save(settings)
        if state.step < cell.steps:
            trained = self._call(cell, ["train.py", str(settings)], place, lock)
            if not trained:
                return
            if state_of(cell).step < cell.steps:  # only then may the optimizer's state go
                self._fail(cell, "training ended early, as exit_interval or exit_duration says")
                return
        if not keep_states:
            keep_weights_only(cell.folder)
        for evaluation in state.missing:
            unfinished = cell.file(evaluation, finished=False)
            words = ["--step", str(cell.steps), "--output", str(unfinished)]
            command = ["evaluate.py", str(settings), *evaluation.words, *words]
            if not self._call(cell, command, place, lock):
                return
            _finish(cell, evaluation)
        self._tell(f"{cell.name}: done")

    def _call(self, cell: Cell, words: list[str], place: str | None, lock: int) -> bool:
        """Whether one of our scripts ended well.

        Its process holds the lock too: after a kill -9 of the sweep, which ends it, the cell is
        free when it is gone.
        """
        if self.stopping:
            return False
        where = "" if place is None else f" on device {place}"
        self._tell(f"{cell.name}: {words[0]}{where}")
        log = cell.folder / "sweep.log"
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
        with log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                tied(command),
                env=environment_at(place, len(self.places)),
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
            )
        self.processes.add(process)
        status = process.wait()
        self.processes.discard(process)
        if status and not self.stopping:
            self._fail(cell, _reason(words[0], status, _last_line(log, start)))
        return status == 0

    def _fail(self, cell: Cell, note: str) -> None:
        self.failed.append(cell.name)
        if _disk_is_full(cell.folder, note):
            self.disk_full = True
            full = (
                f"no space is left for {cell.folder} - free some, and give the same command again"
            )
            note = note if os.strerror(errno.ENOSPC) in note else f"{note}; {full}"
        with contextlib.suppress(OSError):  # a full disk; the next line says it
            write_text(cell.folder / "failure.txt", note + "\n")
        self._tell(f"{cell.name}: failed: {note} (all of it: {cell.folder / 'sweep.log'})")


def _disk_is_full(folder: Path, note: str) -> bool:
    """Whether a cell failed because its disk is full, which the log of its script may not say."""
    if os.strerror(errno.ENOSPC) in note:
        return True
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free < FULL


def _finish(cell: Cell, evaluation: Evaluation) -> None:
    """Give the files of an evaluation their names, last the rows: they say that it is whole."""
    unfinished = cell.file(evaluation, finished=False)
    finished = cell.file(evaluation)
    for suffix in (".png", ".jsonl"):
        if unfinished.with_suffix(suffix).exists():
            os.replace(unfinished.with_suffix(suffix), finished.with_suffix(suffix))


def _reason(script: str, status: int, last_line: str) -> str:
    """Why a script failed, from its exit status and the last line of its log."""
    reason = visible(last_line) or f"{script} ended with status {status}"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}; {reason}"
    return reason


def _last_line(log: Path, start: int) -> str:
    """The last line with text that was written from byte `start` on."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
