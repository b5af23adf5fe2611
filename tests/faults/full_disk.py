"""A small disk of its own for a function, without being root where the kernel allows it."""

import ctypes
import json
import os
import signal
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
RECURSIVE, PRIVATE = 0x4000, 1 << 18  # MS_…
LONGEST = 120  # seconds
libc = ctypes.CDLL(None, use_errno=True)


def on_small_disk(folder: Path, kib: int, function: Callable[[], Any]) -> Any:
    """The result of a function in a process that has a disk of `kib` KiB mounted at a folder.

    The function runs in a fork, so what is imported stays imported; it returns plain data. A group
    of processes that was joined before does not work in it: start training by `run`. The disk is
    gone afterwards. pytest.skip with the reason where nothing can be mounted.
    """
    reason = impossible()
    if reason:
        pytest.skip(f"a small disk cannot be mounted here: {reason}")
    return _forked(lambda: [_mount(folder, kib), function()][1])


def fill(folder: Path, leave_kib: int = 0) -> Path:
    """Take all the space of the disk of a folder but `leave_kib`; returns the file that has it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            size = file.tell()
    os.truncate(ballast, max(0, size - 1024 * leave_kib))
    return ballast


@cache
def impossible() -> str | None:
    """The reason why no disk can be mounted, or None if it can."""
    try:
        _forked(lambda: _mount(Path("/tmp"), 64))
    except RuntimeError as fault:
        return str(fault).strip().splitlines()[-1]
    return None


def _mount(folder: Path, kib: int) -> None:
    """Mount a disk at a folder, seen by this process and its children alone."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _check(libc.unshare(NEW_MOUNTS))
    else:
        _check(libc.unshare(NEW_USER | NEW_MOUNTS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    options = f"size={kib}k".encode()
    _check(libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, options))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _forked(function: Callable[[], Any]) -> Any:
    """What a function returns in a fork of this process; RuntimeError with its traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LONGEST)  # a fork that hangs must not hang the tests
        try:
            answer = {"returned": function()}
        except BaseException:
            answer = {"fault": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"the process died without a word, or took {LONGEST} seconds")
    answer = json.loads(text)
    if "fault" in answer:
        raise RuntimeError(answer["fault"])
    return answer["returned"]
