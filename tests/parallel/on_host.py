"""Run a script in a network namespace, as on a machine of its own.

on_host.py NAMESPACE SCRIPT WORDS
"""

import ctypes
import os
import runpy
import sys

NETWORK = 0x40000000  # CLONE_NEWNET

if __name__ == "__main__":
    name, script, *words = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"the namespace {name} cannot be entered")
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
