"""Test whether this machine can run a training; each finding has a remedy.

python tools/doctor.py [--save runs] [--data data]

It tests Python and the packages, torch and the GPUs, triton's compiler, the imports of a training,
disks and /dev/shm. Nothing is changed or sent. The exit status is 1 if something would stop a run,
else 0.
"""

import sys

if sys.hexversion < 0x030B0000:  # before anything that an older Python cannot read
    sys.exit(f"python: {sys.version.split()[0]} is too old - use Python 3.11 or newer")

import argparse
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError, in_words, visible
from megatron.files import ROOT
from megatron.parallel.machine import free_disk, in_bytes

RUN = 5_200_000_000  # bytes: two checkpoints of configs/125M.yml, at 16 for each of 162 million
LEAST_RUN = 100_000_000  # bytes: not even the checkpoints of small runs
OTHERS = 1_000_000_000  # bytes: archives, compiled kernels; in /dev/shm what NCCL and batches need
PATIENCE = 300  # seconds: importing from a slow network disk takes a minute or two
DRIVER = Path("/proc/driver/nvidia/version")
INSTALL = "pip install -r requirements.txt"
TORCH = "pip install torch, with the --index-url of pytorch.org for this driver"
NVIDIA = f"look at nvidia-smi; in a container give it the devices (--gpus all); or {TORCH}"
ALONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # one process alone opens no port
"""Inside a job of a scheduler the trial must wait for nobody."""
STEPS = {"torch": INSTALL, "gpu": NVIDIA, "training": INSTALL, "processes": INSTALL}
"""Steps that are tried in a process of their own, in this order, and the cure of each."""


class Diagnosis(NamedTuple):
    """One thing that was looked at.

    level: `stops` would end a run or keep it from starting; `warning` costs speed or some command
    """

    level: str
    subject: str
    text: str
    fix: str = ""


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--save", type=Path, default=Path("runs"), metavar="DIR", help="folder for checkpoints")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="folder of token files")
    add("--try", action="store_true", dest="tries", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tries:
        try:
            for finding in try_steps():
                print(json.dumps({"finding": finding}), flush=True)
        except Exception as fault:  # whatever a broken package raises is a finding
            raise UserError(f"{type(fault).__name__}: {in_words(fault)}") from fault
        return 0

    findings = [*packages(), *tried()]
    temporary = Path(tempfile.gettempdir())
    for subject, path, enough, least in (
        ("save", options.save, RUN, LEAST_RUN),
        ("data", options.data, OTHERS, 0),
        ("temporary", temporary, OTHERS, LEAST_RUN),
        ("memory", Path("/dev/shm"), OTHERS, 0),  # num_workers and several GPUs need it
    ):
        findings.append(folder(path, subject, enough=enough, least=least))
    for level, subject, text, fix in findings:
        line = f"{level:<8} {subject:<12} {text}"
        print(visible(f"{line} - {fix}" if fix else line))
    levels = [finding.level for finding in findings]
    stopping = levels.count("stops")
    verdict = f"{stopping} finding(s)" if stopping else "nothing"
    print(f"{verdict} would stop a run, {levels.count('warning')} warning(s)")
    return int(bool(stopping))


def packages() -> Iterator[Diagnosis]:
    """Python, and what is missing or outside its tested range.

    No missing package stops a run by itself: `tried` loads what a training loads.
    """
    yield Diagnosis("ok", "python", f"{sys.version.split()[0]} ({sys.executable})")
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Diagnosis("stops", "packages", "`packaging` is not installed", INSTALL)
        return
    within = 0
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            what = f"{requirement.name} is not installed; commands that need it fail"
            yield Diagnosis("warning", "packages", what, INSTALL)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            within += 1
            continue
        what = f"{requirement.name} {version} is outside the tested range {requirement.specifier}"
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        yield Diagnosis("warning", "packages", what, fix)
    yield Diagnosis("ok", "packages", f"{within} within their tested ranges")


def tried() -> list[Diagnosis]:
    """The findings of `try_steps`, and the step at which it ends too early.

    In a process of its own: an installation may crash it, and a driver may hang it. What was
    printed before then remains.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            status = subprocess.run(
                [sys.executable, __file__, "--try"],
                stdout=output,
                stderr=errors,
                env=os.environ | ALONE,
                timeout=PATIENCE,
                check=False,
            ).returncode
            ending = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"no answer within {PATIENCE} seconds"
        output.seek(0)
        errors.seek(0)
        last_words = errors.read().strip().splitlines()[-1:]
        lines = output.read().splitlines()
    # Packages print while they load.
    marked = [line for line in lines if line.startswith('{"finding"')]
    findings = [Diagnosis(*json.loads(line)["finding"]) for line in marked]
    subjects = {finding.subject for finding in findings}
    for step, fix in STEPS.items():
        if step not in subjects:
            findings.append(Diagnosis("stops", step, ": ".join([ending, *last_words]), fix))
            break
    return findings


def try_steps() -> Iterator[Diagnosis]:
    """torch, GPUs, a training's imports and a group of one process, each tried."""
    import torch

    build = torch.version.cuda or torch.version.hip
    yield Diagnosis("ok", "torch", f"{torch.__version__}, built for {build or 'the CPU alone'}")
    reason = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as fault:
        reason = str(fault).strip().splitlines()[0]
    names = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(256, 256, device=f"cuda:{index}")
        assert (ones @ ones)[0, 0].item() == 256, f"cuda:{index}: a product of ones is wrong"
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        names.append(f"{name}, {in_bytes(free)} of {in_bytes(total)} free")
    yield from gpus(build, names, reason)

    import megatron.evaluation.evaluate_checkpoint
    import megatron.training.loop  # noqa: F401
    from megatron.parallel.grid import connect, left_at_the_end

    yield Diagnosis("ok", "training", "all its packages load")
    with left_at_the_end():
        connect()
    yield Diagnosis("ok", "processes", "DeepSpeed joins a group of processes")


def gpus(build: str | None, names: Sequence[str], reason: str) -> Iterator[Diagnosis]:
    """The GPUs that torch sees, and the compiler that triton needs for them.

    build: of torch, None for the CPU alone; reason: why torch sees no GPU
    """
    for name in names:
        yield Diagnosis("ok", "gpu", name)
    if not names:
        text = "no NVIDIA driver: training runs on the CPU"
        if not DRIVER.exists():
            yield Diagnosis("ok", "gpu", text)
        elif build is None:
            text = "there is an NVIDIA driver, but this torch is built for the CPU"
            yield Diagnosis("warning", "gpu", text, TORCH)
        else:
            text = f"there is an NVIDIA driver, but torch sees no device: {reason}"
            yield Diagnosis("stops", "gpu", text, NVIDIA)
        return
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler and header.is_file():
        yield Diagnosis("ok", "compiler", compiler)
        return
    text = f"triton compiles with a C compiler and {header}, and one is missing"
    fix = "apt install gcc python3-dev, set CC to a compiler, or set attention_backend=sdpa"
    yield Diagnosis("stops", "compiler", text, fix)


def folder(path: Path, subject: str, *, enough: int, least: int) -> Diagnosis:
    """Whether a folder can be made and written as a run does with `save`, and its free space.

    enough: bytes below which it is a warning; least: bytes below which a run would stop
    """
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as trial:
            (Path(trial) / "written").write_text("whole\n")
    except OSError as fault:
        level = "stops" if least else "warning"
        return Diagnosis(
            level, subject, f"{path} cannot be written: {fault}", "name another folder"
        )
    free = free_disk(path)
    if free is None:
        return Diagnosis("ok", subject, f"{path} can be written")
    text = f"{path} can be written, {in_bytes(free)} free"
    if free >= enough:
        return Diagnosis("ok", subject, text)
    level = "stops" if free < least else "warning"
    fix = "free some space, or name a folder of another disk"
    if subject == "memory":
        fix = "docker run --ipc=host or --shm-size=8g; else mount -o remount,size=8G /dev/shm"
    return Diagnosis(level, subject, f"{text}: {in_bytes(enough)} are advised", fix)


if __name__ == "__main__":
    sys.exit(main())
