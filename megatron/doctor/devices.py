"""What the probe's facts mean: torch, threads, GPUs with their driver, compiler, processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.doctor.finding import Finding, ok, stops, warning
from megatron.doctor.packages import INSTALL, triton_of_torch
from megatron.files import ROOT
from megatron.parallel.machine import in_bytes

Facts = Mapping[str, Any]
Steps = Mapping[str, Facts]

PATIENCE = 300  # seconds for all steps: importing from a slow network disk takes a minute or two
PROBE = "megatron.doctor.probe"
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
"""Of all CUDA builds with this major version: NVIDIA's minor version compatibility
(docs.nvidia.com/deploy/cuda-compatibility)."""
ALONE = {
    "WORLD_SIZE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # one process alone opens no port
}
"""Inside a job of a scheduler the probe must wait for nobody."""
SMALL_SHARE = 0.2  # of a GPU's memory, which other programs may have without a word
TORCH = "pip install torch, with the --index-url of pytorch.org for this driver"


# --- Ask ---


def probed(command: list[str] | None = None, patience: float = PATIENCE) -> dict[str, Facts]:
    """The facts of each step by its name; `fault` where a step failed, crashed or hung."""
    command = command or [sys.executable, "-m", PROBE]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **ALONE,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            status = process.wait(patience)
            ending = f"it ended the process with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"no answer within {patience:g} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        errors.seek(0)
        last_words = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return _steps(output.read().decode(errors="replace"), " ".join([ending, *last_words]))


def _steps(text: str, ending: str) -> dict[str, Facts]:
    """Facts by step; a step that began and has none gets the ending as its fault."""
    steps: dict[str, Facts] = {}
    begun = "torch"
    for line in text.splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            continue  # a compiled library has printed something
        if isinstance(facts, dict) and "begins" in facts:
            begun = facts["begins"]
        elif isinstance(facts, dict) and "step" in facts:
            steps[facts["step"]] = facts
    if begun not in steps:
        steps[begun] = {"step": begun, "fault": ending}
    return steps


# --- Judge ---


def judged(steps: Steps) -> list[Finding]:
    """Findings about all that the probe has tried. A step that is missing is left out."""
    torch = steps.get("torch", {})
    if "fault" in torch:
        return [stops("torch", f"cannot be imported: {torch['fault']}", INSTALL)]
    findings = [_torch(torch)]
    findings += _threads(steps.get("threads", {}))
    findings += _gpus(torch, steps.get("driver", {}), steps.get("devices", {}))
    findings += _triton(steps.get("devices", {}))
    findings += _apex(steps.get("apex", {}))
    findings += _loads(steps)
    return findings


def _torch(torch: Facts) -> Finding:
    if torch.get("cuda_build"):
        build = f"built for CUDA {torch['cuda_build']}"
    elif torch.get("hip_build"):
        build = f"built for ROCm {torch['hip_build']}"
    else:
        build = "built for the CPU alone"
    return ok("torch", f"{torch['version']}, {build}")


def _threads(threads: Facts) -> list[Finding]:
    if "cores" not in threads:
        return _failed("threads", threads, "unset OMP_NUM_THREADS and MKL_NUM_THREADS")
    if threads["warning"]:
        what, _, fix = threads["warning"].partition("; ")
        return [warning("threads", what, fix)]
    text = f"{threads['cores']} core(s), {threads['busy']} of them busy; torch uses"
    return [ok("threads", f"{text} {threads['threads']} thread(s)")]


def _gpus(torch: Facts, driver: Facts, devices: Facts) -> list[Finding]:
    """The driver against torch's build, and every device."""
    release = driver_release()
    if "fault" in devices:
        fix = "look at nvidia-smi and the system's log; a driver that hangs needs a restart"
        return [stops("gpu", f"asking for devices failed: {devices['fault']}", fix)]
    found = devices.get("devices", [])
    if found:
        of_driver = f"driver {release or 'unknown'}, CUDA {_dotted(driver.get('cuda'))}"
        return [ok("driver", of_driver), *(_gpu(index, one) for index, one in enumerate(found))]
    if driver.get("cuda") is None and release is None:
        return [ok("gpu", "no NVIDIA driver: training runs on the CPU")]
    return [_unused_gpu(torch, driver, devices, release)]


def _unused_gpu(torch: Facts, driver: Facts, devices: Facts, release: str | None) -> Finding:
    """Why torch sees no device although there is a driver."""
    text = f"driver {release or 'unknown'} (CUDA {_dotted(driver.get('cuda'))})"
    hiding = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hiding is not None and not re.match(r"\d|GPU|MIG", hiding):
        text = f"{text}, and CUDA_VISIBLE_DEVICES={hiding!r} hides all devices"
        return warning("gpu", text, "unset it to train on the GPU")
    if not torch.get("cuda_build"):
        text = f"{text}, but this torch is built for the CPU: training would run there"
        return warning("gpu", text, TORCH)
    wanted = _major(torch["cuda_build"])
    has = (driver.get("cuda") or 0) // 1000
    if has < wanted:
        oldest = OLDEST_DRIVER.get(wanted, "a newer one")
        text = f"{text} is too old for torch's CUDA {torch['cuda_build']}"
        return stops("gpu", text, f"install driver {oldest} or newer, or {TORCH}")
    reason = devices.get("reason") or "without a reason"
    fix = "look at nvidia-smi; in a container give it the devices (docker run --gpus all)"
    return stops("gpu", f"{text}, but torch sees no device: {reason}", fix)


def _gpu(index: int, device: Facts) -> Finding:
    subject = f"gpu {index}"
    text = f"{device['name']}, compute capability {device['capability']}"
    if device["fault"]:
        fix = (
            "look at nvidia-smi: another program may fill it; if torch has no kernels for this"
            f" capability, {TORCH}"
        )
        return stops(subject, f"{text}: a small product failed: {device['fault']}", fix)
    used = device["memory"] - device["free"]
    text = f"{text}, {in_bytes(device['free'])} of {in_bytes(device['memory'])} free"
    if used > SMALL_SHARE * device["memory"]:
        return warning(subject, text, "end the other programs (nvidia-smi), or lower the batch")
    if float(device["capability"]) < 8:
        return warning(subject, f"{text}; it has no fast bf16", "set precision=fp16 or fp32")
    return ok(subject, text)


def _triton(devices: Facts) -> list[Finding]:
    """triton and its compiler, which attention with tables needs on a GPU."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not devices.get("devices"):
        if compiler is None:
            return [ok("compiler", "none; on the CPU only torch_compile: true needs one")]
        return [ok("compiler", f"{compiler}; on the CPU only torch_compile: true needs one")]
    findings = []
    instead = "or set attention_backend=sdpa"
    fault = triton_of_torch()
    if fault is not None:
        findings.append(stops("triton", fault, f"pip install the one that torch wants, {instead}"))
    if compiler is None or shutil.which(compiler) is None:
        text = "no C compiler, which triton needs at its first launch"
        fix = f"apt install gcc, or set CC to one, {instead}"
        findings.append(stops("compiler", text, fix))
        return findings
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        text = f"{header} is missing, which triton compiles with"
        findings.append(stops("compiler", text, f"apt install {package}, {instead}"))
    return findings or [ok("triton", f"as torch wants it, with {compiler}")]


def _apex(apex: Facts) -> list[Finding]:
    if apex.get("works") or apex.get("installed") is False:
        text = "NVIDIA's, with its kernels" if apex["works"] else "not installed, not needed"
        return [ok("apex", text)]
    if not apex:
        return []
    text = "the installed package is not NVIDIA apex with its kernels (PyPI's is a web toolkit)"
    return [warning("apex", text, "pip uninstall apex; torch's fused AdamW is used")]


def _loads(steps: Steps) -> list[Finding]:
    """Whether training can be loaded, and whether a process can join a group."""
    findings = []
    for subject, fine in (
        ("training", "all its packages load"),
        ("processes", "DeepSpeed joins a group of processes"),
    ):
        facts = steps.get(subject)
        if facts is None:
            continue
        findings += _failed(subject, facts, INSTALL) or [ok(subject, fine)]
    return findings


def _failed(subject: str, facts: Facts, fix: str) -> list[Finding]:
    if "fault" not in facts:
        return []
    return [stops(subject, f"failed: {facts['fault']}", fix)]


def driver_release(path: Path = KERNEL_MODULE) -> str | None:
    """The driver's release, such as 570.86.15; None without NVIDIA's kernel module."""
    try:
        first = path.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", first)
    return match[1] if match else None


def _dotted(version: int | None) -> str:
    """CUDA's number for a version, 12040, in words: 12.4."""
    return "unknown" if not version else f"{version // 1000}.{version % 1000 // 10}"


def _major(version: str) -> int:
    return int(version.split(".")[0])
