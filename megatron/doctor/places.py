"""Disks, shared memory, locks of interrupted builds, and the network inside this machine."""

import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from megatron.doctor.finding import Finding, ok, stops, warning
from megatron.errors import UserError, cure
from megatron.files import write_text
from megatron.folder_lock import owned_folder
from megatron.parallel.machine import free_disk, in_bytes, total_memory

RUN = 5_200_000_000  # bytes: two checkpoints of configs/125M.yml, at 16 for each of 162 million
LEAST_RUN = 100_000_000  # bytes: not even the checkpoints of small runs
TEMPORARY = 1_000_000_000  # bytes: archives, compiled kernels
SHARED = 1_000_000_000  # bytes: NCCL between GPUs and batches of num_workers; Docker gives 64 MB
MEMORY = 2_000_000_000  # bytes: Python with its packages takes 0.5 GB for each process
BUILD = 600  # seconds that a build of an extension takes at most
INTERFACE = "lo"
PATIENCE = 5  # seconds for a connection inside this machine


def folder(path: Path, subject: str, *, enough: int, least: int | None) -> Finding:
    """Whether a folder, or the one that it will be made in, can be written, and its free space.

    enough: bytes below which it is a warning
    least: bytes below which a run would stop; None where a run writes nothing
    """
    unusable = warning if least is None else stops
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not existing.is_dir():
        return unusable(subject, f"{existing} is a file", "name a folder, or move the file")
    fault = write_fault(existing)
    if fault is not None:
        return unusable(subject, f"{path}: cannot be written: {fault}", "name another folder")
    return _space(path, subject, enough, least or 0)


def write_fault(existing: Path) -> str | None:
    """Why a run could not keep files in a folder; None where it can.

    A folder in it is made, locked, written and removed, as a run does with `save`.
    """
    try:
        trial = Path(tempfile.mkdtemp(prefix=".doctor-", dir=existing))
    except OSError as fault:
        return f"{fault.strerror}; {cure(fault) or 'check its rights'}"
    try:
        with owned_folder(trial, "folder"):
            write_text(trial / "written", "whole\n")
    except UserError as fault:
        return str(fault)
    except OSError as fault:
        return f"{fault.strerror}; {cure(fault) or 'check the disk'}"
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return None


def _space(path: Path, subject: str, enough: int, least: int) -> Finding:
    free = free_disk(path)
    if free is None:
        return ok(subject, f"{path} can be written; the disk does not say how much is free")
    text = f"{path} can be written, {in_bytes(free)} free"
    fix = "free some space, or name a folder of another disk"
    if free < least:
        return stops(subject, f"{text}: less than {in_bytes(least)}", fix)
    if free < enough:
        return warning(subject, f"{text}: {in_bytes(enough)} are advised", fix)
    return ok(subject, text)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Whether processes of this machine can share enough memory."""
    subject = "/dev/shm"
    fix = "docker run --ipc=host or --shm-size=8g; elsewhere mount -o remount,size=8G /dev/shm"
    if not sys.platform.startswith("linux"):
        return ok(subject, "not of this system")
    try:
        usage = shutil.disk_usage(path)
    except OSError as fault:
        text = f"{path}: {fault.strerror}; num_workers and several GPUs need it"
        return warning(subject, text, fix)
    text = f"{in_bytes(usage.free)} of {in_bytes(usage.total)} free"
    if usage.free < SHARED:
        return warning(subject, f"{text}: num_workers and several GPUs may need more", fix)
    return ok(subject, text)


def memory() -> Finding:
    """The memory that all processes here share."""
    total = total_memory()
    text = f"{in_bytes(total)} of memory, with the container's limit"
    if total < MEMORY:
        return warning("memory", text, "close other programs, or raise the container's limit")
    return ok("memory", text)


def extensions_folder() -> Path:
    """Where torch and DeepSpeed build extensions, as torch.utils.cpp_extension finds it."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def stale_locks(place: Path | None = None, now: float | None = None) -> list[Finding]:
    """Locks that an interrupted build left behind: whoever builds there again waits for ever.

    torch up to 2.13 takes a file for a lock, which stays when its process is killed
    (pytorch#189245). No run of this project builds there; other programs of the user do.
    """
    subject = "build locks"
    place = extensions_folder() if place is None else place
    now = time.time() if now is None else now
    findings = []
    for lock in sorted(place.rglob("lock")):
        try:
            age = now - lock.stat().st_mtime
        except OSError:
            continue  # its build has just ended
        if age > BUILD:
            text = f"{lock} is {age / 3600:.1f} hours old: a build was interrupted"
            findings.append(warning(subject, f"{text}, and the next one waits", f"rm '{lock}'"))
    return findings or [ok(subject, f"none left behind in {place}")]


def loopback() -> Finding:
    """Whether processes of this machine can meet, as several ranks on it do."""
    subject = "loopback"
    fix = "ip link set lo up, and let no firewall close 127.0.0.1"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE)
            caller = socket.create_connection(server.getsockname(), timeout=PATIENCE)
            with caller, server.accept()[0] as called:
                caller.sendall(b"here")
                called.settimeout(PATIENCE)
                answer = called.recv(4)
    except OSError as fault:
        reason = fault.strerror or str(fault)
        return stops(subject, f"127.0.0.1 does not answer ({reason})", fix)
    if answer != b"here":
        return stops(subject, "127.0.0.1 loses what is sent", fix)
    if INTERFACE not in {name for _, name in socket.if_nameindex()}:
        fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of 127.0.0.1"
        return warning(subject, f"works, but no interface is called {INTERFACE}", fix)
    return ok(subject, "processes of this machine can meet at 127.0.0.1")
