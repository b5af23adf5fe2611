"""One process for each device of this machine: signals reach all, the end of one ends the others.

The first signal is passed on, and the processes have all the time that a checkpoint takes; only a
second ctrl-C ends them without saving. Processes have groups of their own, so that ctrl-C in a
terminal reaches them through the launcher alone. They are killed when the launcher is killed.
"""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.errors import UserError
from megatron.parallel.die_with_parent import die_with_parent

PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    # A process that is still importing ends at SIGTERM without a word; ctrl-C prints a traceback.
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}
"""Which signal the processes get for one that the launcher gets."""
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
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # a torchrun around us has a store of its own
    }
    ranks = map(str, range(count))
    return [{**environment, **shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


class Ending(NamedTuple):
    """How a run ended.

    status: 0 if all processes ended well; 128 + N after signal N, or if one was killed by signal N;
    else that of the first process that failed
    message: names a rank whose own words cannot have said that it failed
    """

    status: int
    message: str = ""


class Launcher:
    """The processes of a run, ordered by rank."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.ended: dict[int, int] = {}  # the status of each rank that ended by itself, in order
        self.received = 0  # the first signal
        self.received_at = 0.0
        self.deadline = float("inf")  # when those that still run are killed

    def run(self, command: Sequence[str], ranks: Sequence[Mapping[str, str]]) -> Ending:
        """Start the command in each environment and wait for all.

        Raises UserError if one cannot be started; then none is left.
        """
        before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        if before[signal.SIGHUP] == signal.SIG_IGN:  # under nohup
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            for environment in ranks:
                process = subprocess.Popen(
                    die_with_parent(command),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
                self.processes.append(process)
                if self.received:
                    self._send(PASSED_ON[signal.Signals(self.received)])
                    break
            while len(self.ended) < len(self.processes) and time.monotonic() < self.deadline:
                self._look()
                time.sleep(PAUSE)
        except OSError as fault:
            raise UserError(
                f"num_gpus: process {len(self.processes) + 1} of {len(ranks)} cannot be started"
                f" ({fault.strerror}) - lower num_gpus, or end other programs"
            ) from None
        finally:
            self._look()
            self._send(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

        failed = {rank: status for rank, status in self.ended.items() if status}
        suffix = "; the others were ended" if len(self.processes) > 1 else ""
        for rank, status in failed.items():
            if self._is_stop(status):
                continue
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
                if -status == signal.SIGKILL:
                    how += " (out of memory? dmesg says it)"
                return Ending(128 - status, f"rank {rank}: {how}{suffix}")
            if rank == 0:  # it has printed its own fault
                return Ending(status)
            return Ending(status, f"rank {rank}: ended with status {status}{suffix}")
        if self.received and (failed or len(self.ended) < len(self.processes)):
            return Ending(128 + self.received)
        return Ending(next(iter(failed.values()), 0))

    def _look(self) -> None:
        """Note who has ended: the others would wait for ever for one that failed."""
        for rank, process in enumerate(self.processes):
            status = process.poll()
            if status is None or rank in self.ended:
                continue
            self.ended[rank] = status
            if status:
                patience = AFTER_A_STOP if self._is_stop(status) else AFTER_A_FAULT
                self.deadline = min(self.deadline, time.monotonic() + patience)

    def _is_stop(self, status: int) -> bool:
        """Whether a process ended as after a signal: by itself, or before it could catch one."""
        return status - 128 in PASSED_ON or (bool(self.received) and -status in PASSED_ON)

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)  # does nothing to one that has ended

    def _pass_on(self, number: int, frame: object) -> None:
        moment = time.monotonic()
        if not self.received:
            self.received, self.received_at = number, moment
            self._send(PASSED_ON[signal.Signals(number)])
        elif number == signal.SIGINT and moment - self.received_at > ONE_SIGNAL:
            self._send(signal.SIGINT)
            self.deadline = min(self.deadline, moment + PATIENCE)
