"""Whether the hub, or another server, can be reached from here."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 5.0  # to reach it


def hub() -> str:
    """The address of the hub, or of the mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_is_reachable() -> bool:
    """Whether the hub answers, and the user does not forbid it (HF_HUB_OFFLINE)."""
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    return not offline and is_reachable(hub())


def is_reachable(address: str) -> bool:
    """Whether something listens at an address, such as https://api.wandb.ai, or at its proxy."""
    try:
        server = urlsplit(address)
        if not server.hostname:
            return False
        proxy = getproxies().get(server.scheme)
        if proxy and not proxy_bypass(server.hostname):
            server = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        port = server.port or (443 if server.scheme == "https" else 80)
        socket.create_connection((server.hostname or "", port), timeout=SECONDS).close()
    except (OSError, ValueError):  # no port is 123456
        return False
    return True
