"""Processes that end when their parent ends, however it ends, so no orphan keeps training.

Run as a script, this file asks the kernel to do that and then becomes another command. So it needs
only the standard library, and the command needn't know about it. Only Linux can do this; elsewhere
commands start without it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that this process gets when its parent ends


def die_with_parent(command: Sequence[str]) -> list[str]:
    """The command for a child process that is killed when the thread that started it ends.

    For Linux the thread is the parent, so that thread must wait for the child.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, or now if it has already ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel got the request
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
