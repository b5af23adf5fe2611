"""Do what is missing of a sweep: one process per device, each cell locked while somebody works on it."""

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.errors import UserError
from megatron.files import ROOT
from megatron.sweeps.plan import Cell, Sweep
from megatron.sweeps.state import state_of

Say = Callable[[str], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Runner:
    """Works on cells from several threads, one for each place; `failed` are the names of cells that did not end well.

    places: what CUDA_VISIBLE_DEVICES says to the processes of each; None leaves it as it is
    """

    places: Sequence[str | None]
    say: Say
    failed: list[str] = field(default_factory=list)
    stopping: bool = False
    processes: set[subprocess.Popen] = field(default_factory=set)
    told: set[subprocess.Popen] = field(default_factory=set)

    def run(self, sweep: Sweep) -> None:
        """Until nothing is left to begin; after a signal, until what runs has saved and ended."""
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in sweep.cells:
            waiting.put(cell)
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
        before = {number: signal.signal(number, self._stop) for number in caught}
        workers = [
            threading.Thread(target=self._work, args=(waiting, place)) for place in self.places
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
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True
        with contextlib.suppress(OSError):  # a terminal that is gone
            self.say(
                f"{signal.Signals(number).name}: what runs saves a checkpoint and ends; the same command continues"
            )

    def _terminate(self) -> None:
        """Each process is told once: train.py takes a second signal at its word and saves nothing."""
        for process in list(self.processes - self.told):
            self.told.add(process)
            process.terminate()

    def _work(self, waiting: "queue.SimpleQueue[Cell]", place: str | None) -> None:
        # Processes inherit this: what a terminal sends to all of them comes once, from _terminate.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        while not self.stopping:
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return
            with held(cell.folder) as lock:
                if lock is None:
                    self.say(f"{cell.name}: another process is at work on it")
                    continue
                try:
                    self._do(cell, place, lock)
                except (
                    UserError,
                    OSError,
                ) as fault:  # a damaged file, a full disk: the other cells go on
                    self._fail(cell, str(fault))

    def _do(self, cell: Cell, place: str | None, lock: int) -> None:
        state = state_of(cell)
        if state.kind == "done":
            return
        if state.kind == "foreign":
            self._fail(cell, f"{state.note} - move it away, or give another --folder")
            return
        (cell.folder / "failure.txt").unlink(missing_ok=True)
        settings = cell.folder / "cell.yml"
        cell.config.save(settings)
        if state.step < cell.steps and not self._call(
            cell, ["train.py", str(settings)], place, lock
        ):
            return
        for one in state.missing:
            unfinished, finished = cell.file(one, finished=False), cell.file(one)
            words = ["--step", str(cell.steps), "--output", str(unfinished)]
            if not self._call(
                cell, ["evaluate.py", str(settings), *one.words, *words], place, lock
            ):
                return
            for suffix in (".png", ".jsonl"):  # the rows last: they say that all is there
                if unfinished.with_suffix(suffix).exists():
                    os.replace(unfinished.with_suffix(suffix), finished.with_suffix(suffix))
        self.say(f"{cell.name}: done")

    def _call(self, cell: Cell, words: list[str], place: str | None, lock: int) -> bool:
        """Whether one of our scripts ended well. Its process holds the lock too, and may outlive a killed sweep."""
        if self.stopping:
            return False
        self.say(f"{cell.name}: {words[0]}" + ("" if place is None else f" on device {place}"))
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.places))
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        environment |= {} if place is None else {"CUDA_VISIBLE_DEVICES": place}
        log = cell.folder / "sweep.log"
        with log.open("ab") as output:
            start = output.tell()
            command = [sys.executable, str(ROOT / words[0]), *words[1:]]
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, pass_fds=(lock,)
            )
        self.processes.add(process)
        status = process.wait()
        self.processes.discard(process)
        if status and not self.stopping:
            ended = f"killed by {signal.Signals(-status).name}; " if status < 0 else ""
            self._fail(
                cell, ended + (_last_line(log, start) or f"{words[0]} ended with status {status}")
            )
        return status == 0

    def _fail(self, cell: Cell, note: str) -> None:
        self.failed.append(cell.name)
        with contextlib.suppress(OSError):  # a full disk; it is said below
            (cell.folder / "failure.txt").write_text(note + "\n", encoding="utf-8")
        self.say(f"{cell.name}: failed: {note} (all of it: {cell.folder / 'sweep.log'})")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """The lock of a cell as a file descriptor, or None while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield file.fileno()


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
