"""Processes that end when their parent ends, however it ends: no orphan keeps training.

Run as a file it asks the kernel for that and becomes another command. So it needs nothing but the
standard library, and a command need not know of it. Only Linux can do this; elsewhere commands
start without it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that this process gets when its parent ends


def die_with_parent(command: Sequence[str]) -> list[str]:
    """The command, for a child of this process: it is killed when the thread that starts it ends.

    Linux counts the thread as the parent, so that thread must wait for the child.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, at once if it has ended already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew of the wish
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
