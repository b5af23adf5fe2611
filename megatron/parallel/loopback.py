"""Processes of one machine meet on its loopback interface, where no other machine can reach them.

torch's own store and gloo listen on every interface, and ask nobody who connects for a password.
"""

import os
import socket
from ipaddress import ip_address

# torch documents these three, but its __all__ lacks them.
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

# Ranks of this machine, as launchers say it.
LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
INTERFACE = "lo"


def stay_inside() -> None:
    """Let gloo and NCCL use the loopback interface, unless the user has named another."""
    if not _one_machine() or INTERFACE not in _interfaces():
        return
    for name in INTERFACES:
        os.environ.setdefault(name, INTERFACE)


def store() -> Store | None:
    """Where the ranks meet; None where a launcher makes the place. One alone needs no port.

    It waits for nobody: the first rank has it at once, others if the first can be reached.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    made_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if made_by_launcher:
        return None
    first = os.environ["RANK"] == "0"
    if not (first and _is_loopback(host)):
        return TCPStore(host, port, ranks, is_master=first, wait_for_workers=False)
    listening = socket.create_server((host, port))  # torch closes it
    return TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _one_machine() -> bool:
    """Whether all ranks are known to be on this machine."""
    ranks = os.environ["WORLD_SIZE"]
    if ranks == "1" or os.environ.get("SLURM_NNODES") == "1":
        return True
    known = [os.environ.get(name) for name in LOCAL_RANKS]
    return ranks in known or _is_loopback(os.environ.get("MASTER_ADDR", ""))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}
