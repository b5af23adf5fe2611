"""Tries what a run needs of torch, and prints what it finds as lines of JSON: one for each step.

python -m megatron.doctor.probe

A process of its own: an installation may crash it, and a driver may hang it. What was printed
before then remains, so the step at which it ended is known.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import os
import sys
from typing import Any

Facts = dict[str, Any]
SIDE = 256  # of the matrices that every device multiplies


def torch_itself() -> Facts:
    """Versions of torch and of what it was built for."""
    import torch

    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }


def threads() -> Facts:
    """Threads on the CPU, and what is wrong with their number."""
    import torch

    from megatron.parallel.threads import BY_USER, this_machine, too_many

    machine = this_machine()
    count = torch.get_num_threads()
    by_user = next((name for name in BY_USER if name in os.environ), None)
    warning = too_many(count, machine, by_user) if by_user else None
    return {"cores": machine.cores, "busy": machine.busy, "threads": count, "warning": warning}


def driver() -> Facts:
    """The CUDA version of the driver, 12040 for 12.4; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"cuda": None}
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return {"cuda": version.value}


def devices() -> Facts:
    """CUDA devices, each with what went wrong in a small product."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return {"reason": None, "devices": []}
    reason = None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as fault:
        reason = _first_line(fault)
    if not torch.cuda.is_available():
        return {"reason": reason, "devices": []}
    every = [_device(index) for index in range(torch.cuda.device_count())]
    return {"reason": reason, "devices": every}


def _device(index: int) -> Facts:
    import torch

    properties = torch.cuda.get_device_properties(index)
    facts: Facts = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "free": None,
        "fault": None,
    }
    try:
        facts["free"] = torch.cuda.mem_get_info(index)[0]
        ones = torch.ones(SIDE, SIDE, device=f"cuda:{index}")
        product = (ones @ ones)[0, 0].item()
        if product != SIDE:
            facts["fault"] = f"a product of ones is {product}, not {SIDE}"
    except RuntimeError as fault:
        facts["fault"] = _first_line(fault)
    return facts


def apex() -> Facts:
    """Whether something called apex is installed, and whether it is NVIDIA's with its kernels."""
    if importlib.util.find_spec("apex") is None:
        return {"installed": False, "works": False}
    from megatron.training.optimizer import apex_fused_adam

    return {"installed": True, "works": apex_fused_adam() is not None}


def training() -> Facts:
    """Load all that a training and an evaluation load."""
    importlib.import_module("megatron.training.run")
    importlib.import_module("megatron.evaluation.run")
    return {}


def processes() -> Facts:
    """Join a group of one process through DeepSpeed, as a run on one device does."""
    from megatron.parallel.grid import connect, left_at_the_end

    with left_at_the_end():
        grid = connect()
        return {"device": str(grid.device)}


STEPS = {
    "torch": torch_itself,
    "threads": threads,
    "driver": driver,
    "devices": devices,
    "apex": apex,
    "training": training,
    "processes": processes,
}


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0] if lines else type(fault).__name__


def attempt(name: str) -> Facts:
    """The facts of one step, with its name; `fault` where it failed in any way."""
    try:
        # Packages print while they load.
        with contextlib.redirect_stdout(io.StringIO()):
            return {"step": name, **STEPS[name]()}
    except Exception as fault:  # whatever a broken installation raises is what was asked for
        return {"step": name, "fault": f"{type(fault).__name__}: {_first_line(fault)}"}


def main() -> None:
    """Print a line before and after each step; the steps after a broken torch are left out."""
    for name in STEPS:
        _write({"begins": name})
        facts = attempt(name)
        _write(facts)
        if name == "torch" and "fault" in facts:
            return


def _write(facts: Facts) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
