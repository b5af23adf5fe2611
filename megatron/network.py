"""Whether the hub, or another server, can be reached from here."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

HUB = "https://huggingface.co"
SECONDS = 5.0  # to reach it


def hub_host() -> tuple[str, int]:
    """Host and port of the hub, or of the mirror that HF_ENDPOINT names."""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    port = address.port or (80 if address.scheme == "http" else 443)
    return address.hostname or HUB, port


def hub_is_reachable() -> bool:
    """Whether the hub answers, and the user does not forbid it (HF_HUB_OFFLINE)."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    host, port = hub_host()
    return _answers(host, port, urlsplit(os.environ.get("HF_ENDPOINT") or HUB).scheme)


def is_reachable(address: str) -> bool:
    """Whether something listens at an address, such as https://api.wandb.ai, or at its proxy."""
    try:
        parts = urlsplit(address)
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:  # no port is 123456
        return False
    return bool(parts.hostname) and _answers(parts.hostname, port, parts.scheme)


def _answers(host: str, port: int, scheme: str) -> bool:
    try:
        socket.create_connection(_first_hop(host, port, scheme), timeout=SECONDS).close()
    except OSError:
        return False
    return True


def _first_hop(host: str, port: int, scheme: str) -> tuple[str, int]:
    """Host and port to which a connection goes: its own, or a proxy's."""
    proxy = getproxies().get(scheme)
    if not proxy or proxy_bypass(host):
        return host, port
    address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return address.hostname or host, address.port or 80
