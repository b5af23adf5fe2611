"""One process for each device of this machine: signals reach all, the end of one ends the others.

The first signal is passed on, and the processes have all the time that a checkpoint takes; only a
second ctrl-C ends them without saving. Processes have groups of their own, so that ctrl-C in a
terminal reaches them through the launcher alone. They are killed when the launcher is killed.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.errors import UserError
from megatron.parallel.tied import tied

PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    # A process that is still importing ends at SIGTERM without a word; ctrl-C prints a traceback.
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}
"""Which signal the processes get for one that the launcher gets."""
STOPS = {signal.SIGINT, *PASSED_ON}
ONE_SIGNAL = 1.0  # seconds in which a terminal and a shell may both deliver one ctrl-C
PATIENCE = 5.0  # seconds from a second ctrl-C to the end
AFTER_A_FAULT = 2.0  # seconds in which the others may print their own faults
AFTER_A_STOP = 60.0  # seconds in which the others may close what they write after the last save
PAUSE = 0.05  # seconds between two looks at the processes


def environments(environment: Mapping[str, str], count: int, port: int) -> list[dict[str, str]]:
    """The environment of each process, by which torch.distributed finds the others."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "LOCAL_SIZE": str(count),  # DeepSpeed's name for it
    }
    return [
        {**environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(count)
    ]


class Ending(NamedTuple):
    """How a run ended.

    status: 0 where all processes ended well; 128 + N after signal N, or where one was killed by
    signal N; else that of the first process that failed
    message: names a rank whose own words cannot have said that it failed
    """

    status: int
    message: str = ""


@dataclass
class Launcher:
    """The processes of a run, ordered by rank.

    received: the first signal, 0 for none, and when it came
    ended: the status of each rank that ended by itself
    deadline: when those that still run are killed, on the monotonic clock
    """

    processes: list[subprocess.Popen] = field(default_factory=list)
    received: int = 0
    received_at: float = 0.0
    ended: dict[int, int] = field(default_factory=dict)
    deadline: float = float("inf")

    def run(self, command: Sequence[str], ranks: Sequence[Mapping[str, str]]) -> Ending:
        """Start the command in each environment and wait for all.

        UserError where one cannot be started; then none is left.
        """
        handlers: dict[signal.Signals, Any] = dict.fromkeys(PASSED_ON, self._pass_on)
        handlers[signal.SIGTSTP] = self._pause
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
            del handlers[signal.SIGHUP]
        before = {number: signal.signal(number, handlers[number]) for number in handlers}
        try:
            self._start(command, ranks)
            self._wait()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._ending()

    def _start(self, command: Sequence[str], ranks: Sequence[Mapping[str, str]]) -> None:
        for rank, environment in enumerate(ranks):
            if self.received:
                return
            try:
                process = subprocess.Popen(
                    tied(command), env=environment, stdin=subprocess.DEVNULL, process_group=0
                )
            except OSError as fault:
                raise UserError(
                    f"num_gpus: process {rank + 1} of {len(ranks)} cannot be started"
                    f" ({fault.strerror}) - lower num_gpus, or end other programs"
                ) from None
            self.processes.append(process)

    def _wait(self) -> None:
        """Until every process has ended, or the time of those that are left is over."""
        while len(self.ended) < len(self.processes) and time.monotonic() < self.deadline:
            self._look()
            time.sleep(PAUSE)

    def _look(self) -> None:
        """Note who has ended since the last look, those killed first: they may be the cause."""
        found = {}
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and process.poll() is not None:
                found[rank] = process.returncode
        for rank in sorted(found, key=lambda rank: (found[rank] >= 0, rank)):
            self.ended[rank] = found[rank]
            if found[rank]:
                self._end_in(self._grace(found[rank]))

    def _grace(self, status: int) -> float:
        """Seconds that the other ranks get: they would wait for the one that ended for ever."""
        if self._is_stop(status):
            return AFTER_A_STOP
        return AFTER_A_FAULT if status > 0 else 0.0

    def _is_stop(self, status: int) -> bool:
        """Whether a process ended as after a signal: by itself, or before it could catch one."""
        if status - 128 in STOPS:
            return True
        return bool(self.received) and -status in STOPS

    def _end_in(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)  # does nothing to one that has ended

    def _pass_on(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self.received_at = number, now
            self._send(PASSED_ON[signal.Signals(number)])
        elif number == signal.SIGINT and now - self.received_at > ONE_SIGNAL:
            self._send(signal.SIGINT)
            self._end_in(PATIENCE)

    def _pause(self, number: int, frame: object) -> None:
        """Ctrl-Z stops the processes too, until the shell lets this one go on."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _end(self) -> None:
        self._look()
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _ending(self) -> Ending:
        failed = {rank: status for rank, status in self.ended.items() if status}
        for rank, status in failed.items():
            if not self._is_stop(status):
                return self._fault(rank, status)
        ended_well = len(self.ended) == len(self.processes) > 0 and not failed
        if self.received and not ended_well:
            return Ending(128 + self.received)
        return Ending(next(iter(failed.values()), 0))

    def _fault(self, rank: int, status: int) -> Ending:
        if status > 0 and rank == 0:
            return Ending(status)
        others = "; the others were ended" if len(self.processes) > 1 else ""
        message = f"rank {rank}: {_described(status)}{others}"
        return Ending(status if status > 0 else 128 - status, message)


def _described(status: int) -> str:
    """How a process ended: `ended with status 3`."""
    if status > 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = ""
    if -status == signal.SIGKILL:
        hint = " (out of memory? dmesg says it)"
    return f"was killed by {name}{hint}"
