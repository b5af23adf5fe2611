"""How many threads compute on the CPU: chosen from cores, other programs, processes and model size.

Two more things keep a busy machine fast: threads that wait sleep (`OMP_WAIT_POLICY`, set in
megatron/__init__.py), and a number of threads that the user gives is kept, with a warning where the
machine is too busy for it.
"""

import logging
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

logger = logging.getLogger(__name__)

PARAMETERS_PER_THREAD = 400_000
"""For smaller models another thread waits longer than it computes.

With 0.9 million parameters a second thread on an idle core makes steps 1.4 times as fast.
"""
LOCAL_PROCESSES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "LOCAL_SIZE",  # DeepSpeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which users set torch's threads."""
SAMPLES, BETWEEN_SAMPLES = 5, 0.02  # of the programs that run now; seconds


@dataclass(frozen=True)
class Machine:
    """What is there to compute with.

    cores: how many this process may use; load: how many other threads compute on them, on average;
    processes: how many of this run share the cores
    """

    cores: int
    load: float = 0.0
    processes: int = 1

    @property
    def busy(self) -> int:
        """Cores that other programs use, rounded."""
        return min(self.cores, int(self.load + 0.5))

    @property
    def share(self) -> int:
        """Free cores for each process of this run, at least one."""
        free = self.cores - self.busy
        return max(1, free // self.processes)


def count_parameters(model: nn.Module) -> int:
    """Numbers that the model computes with."""
    return sum(parameter.numel() for parameter in model.parameters())


def use_threads(
    parameters: int, device: torch.device, *, before: int | None = None, by_load: bool = True
) -> None:
    """Set the number of torch's threads for a model of this size, and log it with its reason.

    before: the threads of the run that is continued. The order in which threads add up numbers
    changes their last digits, so a resumed run keeps its number where the cores allow it.
    by_load: False: other programs do not count, so that every run here has the same number
    On a GPU nothing changes. The user's number is kept; a busy machine then gets a warning.
    """
    if device.type != "cpu":
        return
    machine = this_machine()
    if not by_load:
        machine = replace(machine, load=0.0)
    by_user = next((name for name in BY_USER if name in os.environ), None)
    if by_user is not None:
        threads = torch.get_num_threads()
        warning = too_many(threads, machine, by_user)
        if warning is not None:
            logger.warning(warning)
        if before is not None and before != threads:
            logger.warning(f"{by_user}: {threads}, was {before} - last digits will differ")
        return
    if before is not None and before <= machine.cores:
        torch.set_num_threads(before)
        logger.info(f"{before} thread(s), as before; OMP_NUM_THREADS sets another number")
        return
    threads, reason = threads_for(parameters, machine)
    torch.set_num_threads(threads)
    logger.info(f"{threads} thread(s): {reason}; OMP_NUM_THREADS sets another number")


def threads_for(parameters: int, machine: Machine) -> tuple[int, str]:
    """How many threads a model with so many parameters gets on a machine, and why."""
    by_size = max(1, parameters // PARAMETERS_PER_THREAD)
    if by_size < machine.share:
        return by_size, f"more would not speed up {parameters:,} parameters"
    reason = f"{machine.cores} core(s)"
    if machine.busy:
        reason += f", {machine.busy} of them busy"
    if machine.processes > 1:
        reason += f", shared by {machine.processes} processes"
    return machine.share, reason


def too_many(threads: int, machine: Machine, name: str = "OMP_NUM_THREADS") -> str | None:
    """A warning where so many threads would wait for each other; None where the cores suffice."""
    if threads == 1 or threads <= machine.share:
        return None
    return (
        f"{name}: {threads} threads in each of {machine.processes} process(es), but"
        f" {machine.busy} of {machine.cores} core(s) are busy - threads will wait for each other;"
        f" set {name}={machine.share}, or unset it to let the load decide"
    )


def this_machine() -> Machine:
    """Cores, load and processes at this moment.

    The other processes of this run start now too. They share the free cores, so they are no load.
    The load is that of the whole machine. A scheduler or a container that gives us some of its
    cores keeps most others off them, so there it does not count.
    """
    cores = available_cores()
    processes = local_processes()
    load = 0.0
    if cores == os.cpu_count():
        load = max(0.0, _load() - (processes - 1))
    return Machine(cores, load, processes)


def available_cores() -> int:
    """Cores that this process may use: its affinity, or less where a container has a quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup/cpu.max"))
    if quota is not None:
        cores = min(cores, max(1, int(quota)))
    return cores


def _cgroup_quota(path: Path) -> float | None:
    """Cores that a container may use by its file cpu.max (`QUOTA PERIOD`), None without a limit."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or the quota is `max`
        return None


def _load() -> float:
    """Other threads that compute both now and on average over the last minute.

    The average alone would count a program that has just ended, often this run's predecessor.
    """
    try:
        last_minute = os.getloadavg()[0]
    except OSError:
        return 0.0
    now = _running_now()
    return last_minute if now is None else min(last_minute, now)


def _running_now() -> float | None:
    """Other threads that can run at this moment, the mean of a few samples; None without /proc."""
    total = 0
    for _ in range(SAMPLES):
        try:
            running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
        except OSError:
            return None
        total += int(running) - 1  # without this thread
        time.sleep(BETWEEN_SAMPLES)
    return total / SAMPLES


def local_processes() -> int:
    """Processes of this run on this machine, as their launcher says."""
    for name in LOCAL_PROCESSES:
        if os.environ.get(name, "").isdecimal():  # parallel/grid.py refuses other texts
            return int(os.environ[name])
    by_slurm = _tasks_on_node(
        os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("SLURM_NODEID", "0")
    )
    if by_slurm is not None:
        return by_slurm
    everywhere = os.environ.get("WORLD_SIZE", "")
    return int(everywhere) if everywhere.isdecimal() else 1


def _tasks_on_node(tasks: str, node: str) -> int | None:
    """Tasks of one node in Slurm's words for all nodes: `2(x3),1` is 2, 2, 2 and 1."""
    counts: list[int] = []
    for group in tasks.split(","):
        words = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if words is None:
            return None
        counts += [int(words[1])] * int(words[2] or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None
