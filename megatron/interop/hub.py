"""A model of the Hugging Face hub by its name: found on this machine, or downloaded."""

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from megatron.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is downloaded: weights, settings and tokenizer, and no code."""
HUB = "https://huggingface.co"
SECONDS = 5.0  # to reach the hub


def is_name(source: str) -> bool:
    """Whether a text looks like owner/model."""
    return NAME.fullmatch(source) is not None


def folder_of(name: str) -> Path:
    """The folder with a model's files.

    UserError, which says which files to copy, where they are not here and no network is.
    """
    from huggingface_hub import snapshot_download  # only here: importing it takes long

    if not _reachable():
        try:
            return Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
        except (OSError, ValueError):  # it was not downloaded earlier
            pass
        wanted = " ".join(f"--include '{pattern}'" for pattern in FILES)
        raise UserError(
            f"{name}: is no folder here, and {_host()[0]} cannot be reached - where there is a"
            f" network, run `hf download {name} {wanted} --local-dir {name.split('/')[1]}`; copy"
            " that folder here and give its path"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (OSError, ValueError) as fault:
        reason = (str(fault).splitlines() or [repr(fault)])[0]
        raise UserError(
            f"{name}: cannot be downloaded ({reason}) - check the name and your rights, or copy"
            " the folder here and give its path"
        ) from None


def _host() -> tuple[str, int]:
    """Host and port of the hub, or of the mirror that HF_ENDPOINT names."""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    port = address.port or (80 if address.scheme == "http" else 443)
    return address.hostname or HUB, port


def _reachable() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        socket.create_connection(_host(), timeout=SECONDS).close()
    except OSError:
        return False
    return True
