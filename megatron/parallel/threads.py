"""How many threads compute on the CPU: chosen from cores, other programs, processes and model size.

Threads that wait sleep (`OMP_WAIT_POLICY`, set in megatron/__init__.py), so a busy machine stays
fast. A number of threads that the user gives is kept.
"""

import logging
import os
from pathlib import Path

import torch
from torch import nn

from megatron.parallel.grid import LOCAL_RANKS

logger = logging.getLogger(__name__)

PARAMETERS_PER_THREAD = 400_000
"""For smaller models another thread waits longer than it computes.

With 0.9 million parameters a second thread on an idle core makes steps 1.4 times as fast.
"""
BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which users set torch's threads."""


def count_parameters(model: nn.Module) -> int:
    """Numbers that the model computes with."""
    return sum(parameter.numel() for parameter in model.parameters())


def use_threads(
    parameters: int, device: torch.device, *, before: int | None = None, by_load: bool = True
) -> None:
    """Set the number of torch's threads for a model of this size, and log it with its reason.

    before: the threads of the run that is continued. The order in which threads add up numbers
    changes their last digits, so a resumed run keeps its number if the cores allow it.
    by_load: False: other programs do not count, so that every run here has the same number
    On a GPU nothing changes. The user's number is kept; a busy machine then gets a warning.
    """
    if device.type != "cpu":
        return
    cores, processes = available_cores(), local_processes()
    busy = min(cores, other_load(processes)) if by_load else 0
    share = max(1, (cores - busy) // processes)
    machine = f"{cores} core(s), {busy} of them busy, for {processes} process(es) of this run"
    by_user = next((name for name in BY_USER if name in os.environ), None)
    if by_user is not None:
        threads = torch.get_num_threads()
        if threads > max(1, share):
            logger.warning(
                f"{by_user}: {threads} threads, but {machine} - threads will wait for each other;"
                f" set {by_user}={share}, or unset it to let the load decide"
            )
        if before not in (None, threads):
            logger.warning(f"{by_user}: {threads}, was {before} - last digits will differ")
        return
    threads = max(1, min(share, parameters // PARAMETERS_PER_THREAD))
    reason = f"{parameters:,} parameters, {machine}"
    if before is not None and before <= cores:
        threads, reason = before, "as before"
    torch.set_num_threads(threads)
    logger.info(f"{threads} thread(s): {reason}; OMP_NUM_THREADS sets another number")


def available_cores() -> int:
    """Cores that this process may use: its affinity, or less if a container has a quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or the quota is `max`
        return cores


def other_load(processes: int) -> int:
    """Threads of other programs that compute both now and on average over the last minute.

    The average alone would count a program that has just ended, often this run's predecessor. The
    other processes of this run start now too, so they are no load. The load is that of the whole
    machine: a scheduler or a container that gives us some of its cores keeps most others off them,
    so there it does not count.
    """
    if available_cores() != os.cpu_count():
        return 0
    try:
        now = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1
        load = min(os.getloadavg()[0], now)
    except OSError:  # macOS
        return 0
    return max(0, round(load) - (processes - 1))


def local_processes() -> int:
    """Processes of this run on this machine, as their launcher says."""
    # Slurm writes `2(x3),1` for nodes with 2, 2, 2 and 1 tasks: the first stands for all.
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")[0].split("(")[0]
    for text in (*(os.environ.get(name, "") for name in LOCAL_RANKS), tasks):
        if text.isdecimal():  # parallel/grid.py refuses other texts
            return int(text)
    everywhere = os.environ.get("WORLD_SIZE", "")
    return int(everywhere) if everywhere.isdecimal() else 1
