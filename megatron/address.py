"""Addresses such as s3://bucket/name in the place of a path, and what they must not hold."""

import os
import re
from urllib.parse import urlsplit

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def is_address(text: str) -> bool:
    """Whether a text names something by a protocol, as s3://, https:// and hf:// do."""
    return ADDRESS.match(text) is not None


def address_fault(address: str) -> str | None:
    """The fault of an address and how to mend it, or None if it is good.

    Configurations, cards and logs repeat addresses, so these hold no passwords or signatures.
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        return "is not an address - write it as s3://bucket/folder/name_text_document"
    if "::" in address:
        return "joins several protocols by '::' - give a plain address"
    if parts.username is not None:
        return (
            f"{without_secrets(address)} is given with a name or password - leave them out, and"
            " give them by the environment of its library (AWS_PROFILE, HF_TOKEN, ~/.netrc …)"
        )
    if parts.query or parts.fragment:
        return (
            f"{without_secrets(address)} is given with a query (what follows ? or #), which may"
            " hold a key - leave it out: both files are found by adding .bin and .idx"
        )
    return None


def place_of(prefix: str) -> str:
    """Where the tokens of a prefix lie, the same for two spellings of one place.

    An address is its own place. Of a path on this machine the folder and the file may be links.
    """
    return prefix if is_address(prefix) else os.path.realpath(f"{prefix}.bin")


def without_secrets(address: str) -> str:
    """The address without name, password, query and fragment."""
    parts = urlsplit(address)
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=place, query="", fragment="").geturl()
