"""How many CPU threads to use (from cores, processes and model size), and how they compute.

Waiting threads sleep (`OMP_WAIT_POLICY`, set in megatron/__init__.py), so a busy machine stays
fast. A number of threads that the user sets is kept.
"""

import logging
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)

PARAMETERS_PER_THREAD = 400_000
"""In smaller models a second thread waits longer than it computes.

With 0.9 million parameters a second thread on an idle core makes steps 1.4 times as fast.
"""
BY_USER = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
"""Variables with which users set torch's threads."""


def count_parameters(model: nn.Module) -> int:
    """The number of parameters that the model computes with."""
    return sum(parameter.numel() for parameter in model.parameters())


def use_threads(parameters: int, device: torch.device, *, before: int | None = None) -> None:
    """Set the number of torch's threads for a model of this size, and log it with its reason.

    before: the threads of the run that is continued. The number of threads changes the order of
    sums and so their last digits, so a resumed run keeps its number if there are enough cores. On a
    GPU nothing changes. The user's number is kept.
    """
    if device.type != "cpu":
        return
    if BY_USER & os.environ.keys():
        threads = torch.get_num_threads()
        if before not in (None, threads):
            logger.warning(f"{threads} thread(s) instead of {before}: last digits will differ")
        return
    cores, processes = available_cores(), local_processes()
    threads = max(1, min(cores // processes, parameters // PARAMETERS_PER_THREAD))
    reason = f"{parameters:,} parameters, {cores} core(s) for {processes} process(es) of this run"
    if before is not None and before <= cores:
        threads, reason = before, "as before"
    torch.set_num_threads(threads)
    logger.info(f"{threads} thread(s): {reason}; OMP_NUM_THREADS sets another number")


def flush_denormals() -> None:
    """Let the CPU treat numbers below 1e-38 as 0.

    Probabilities get this small if a bias falls steeply, and on Intel's CPUs each one costs more
    than a hundred cycles: a step of FoX took twice as long. Threads inherit the mode from the one
    that starts them, so we set it before the first computation.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # NumPy before 2.4 warns if it computes the smallest number later
    torch.set_flush_denormal(True)


def available_cores() -> int:
    """Cores that this process may use: its affinity, or fewer if a container has a quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # there is no such file, or the quota is `max`
        return cores


def local_processes() -> int:
    """Processes of this run on this machine, from the launcher; DeepSpeed's sets LOCAL_SIZE."""
    environment = os.environ
    return int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or 1)
