"""One process per device of this machine; signals reach all, and if one ends, the others end.

We use neither torchrun nor DeepSpeed's launcher, because they kill processes 30 seconds after a
signal, perhaps while a checkpoint is being written, and exit with 1.
"""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from megatron.cli_errors import print_line
from megatron.parallel.die_with_parent import die_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ONE_SIGNAL = 1.0  # within this time (s) a terminal and a shell may both deliver the same ctrl-C
PATIENCE = 5.0  # seconds from a second ctrl-C to the end
AFTER_A_FAULT = 2.0  # seconds for the others to print their own faults
PAUSE = 0.05  # seconds between two checks of the processes


def environments(environment: Mapping[str, str], count: int, port: int) -> list[dict[str, str]]:
    """The environment of each process, with which torch.distributed finds the others."""
    shared = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    ranks = map(str, range(count))
    return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def run(command: Sequence[str], ranks: Sequence[Mapping[str, str]]) -> int:
    """Start the command in each environment, and wait: 0, or the status of the first that failed.

    The status is 128 + N after signal N, which is sent to all, or if one was killed by it.
    Processes have their own groups, so a terminal's ctrl-C only reaches them from here; they are
    killed if this process dies.
    """
    processes = [
        subprocess.Popen(
            die_with_parent(command), env=rank, stdin=subprocess.DEVNULL, process_group=0
        )
        for rank in ranks
    ]
    received, received_at, deadline = 0, 0.0, float("inf")

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal received, received_at, deadline
        moment = time.monotonic()
        if not received:
            received, received_at = number, moment
            # A process that is still importing ends silently at SIGTERM, but noisily at ctrl-C.
            number = signal.SIGTERM if number == signal.SIGINT else number
        elif number == signal.SIGINT and moment - received_at > ONE_SIGNAL:
            deadline = moment + PATIENCE
        else:
            return
        for process in processes:
            process.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    fault = None
    running = True
    while running and time.monotonic() < deadline:
        time.sleep(PAUSE)
        running = any([process.poll() is None for process in processes])
        for rank, process in enumerate(processes):
            status = process.returncode or 0
            is_stop = status - 128 in SIGNALS or (received and -status in SIGNALS)
            if status and not is_stop and fault is None:
                fault = rank, status
                deadline = time.monotonic() + AFTER_A_FAULT
    for process in processes:
        process.kill()
        process.wait()

    statuses = [process.returncode for process in processes]
    if fault is None:
        return 128 + received if received and any(statuses) else max(statuses)
    rank, status = fault
    if status < 0:
        print_line(
            f"rank {rank}: killed by {signal.Signals(-status).name}; the others were stopped"
        )
        return 128 - status
    return status  # it has printed its own fault
