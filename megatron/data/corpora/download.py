"""One file of the network: continued where it was cut off, checked, and only then given its name.

NAME.partial grows beside the file's place. NAME.partial.json says of which version it is a part, so
parts of two versions are never joined.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import cannot_write
from megatron.files import read_small, sha256_of, sync, write_text

if TYPE_CHECKING:  # it takes long to import
    from requests import Response

CHUNK = 1 << 18  # bytes
NOTE_BYTES = 10_000
PASSES = (408, 425, 429, 500, 502, 503, 504)
"""Answers of a server that may be another one soon."""
CONNECTION = re.compile(r"^\w+\(host='[^']*', port=\d+\): ")  # before the reason, in urllib3
REASONS = {401: "needs a login", 403: "needs rights", 404: "is not there", 410: "is gone"}


class DownloadFault(Exception):
    """Why a file cannot be had from a source; its text is the reason."""


class _Interrupted(Exception):
    """Why an attempt ended early; another one may bring more."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Remote:
    """A file that is wanted.

    name: its path below the folder of downloads; bytes, sha256: None where they are not known
    headers: what the server wants to see, such as a token; it is written nowhere
    """

    address: str
    name: str
    bytes: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Patience:
    """How long a download is tried.

    tries: attempts in a row that bring nothing; first_tries: while no server has answered at all
    pause, longest_pause: seconds between attempts, doubled each time
    connect, silence: seconds until a connection stands, and between two packets
    """

    tries: int = 7
    first_tries: int = 2
    pause: float = 1.0
    longest_pause: float = 60.0
    connect: float = 10.0
    silence: float = 60.0


Advance = Callable[[int], None]  # the new bytes; fewer than 0 where a part is thrown away


def fetch(
    remote: Remote, path: Path, patience: Patience | None = None, advance: Advance | None = None
) -> None:
    """Bring a file to its place. What an earlier process left of it is continued.

    Raises DownloadFault with the reason, and UserError where the disk refuses.
    """
    part = _Part(path, advance or _ignored)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _bring(remote, part, patience or Patience())
        part.publish()
    except OSError as fault:  # of the disk: those of the network are _Interrupted
        raise cannot_write(path, fault) from None


def _ignored(new: int) -> None:
    pass


def _bring(remote: Remote, part: "_Part", patience: Patience) -> None:
    """Try until the part is the whole file; a wrong file made of parts is tried once more."""
    _transfer_patiently(remote, part, patience)
    fault = _difference(remote, part)
    if fault and part.continued:
        part.discard()
        _transfer_patiently(remote, part, patience)
        fault = _difference(remote, part)
    if fault:
        part.discard()
        raise DownloadFault(f"{fault}; what came was removed")


def _difference(remote: Remote, part: "_Part") -> str | None:
    """How the file differs from the one that is wanted; None where it does not."""
    if remote.bytes is not None and part.size != remote.bytes:
        return f"{remote.name} has {part.size:,} bytes, not {remote.bytes:,}"
    if remote.sha256 is None:
        return None
    found = sha256_of(part.path)
    if found == remote.sha256:
        return None
    return f"{remote.name} has the sha256 {found[:12]}…, not {remote.sha256[:12]}…"


def _transfer_patiently(remote: Remote, part: "_Part", patience: Patience) -> None:
    longest = part.size_for(remote)
    fruitless = 0
    pause = patience.pause
    while True:
        try:
            _transfer(remote, part, patience)
            return
        except _Interrupted as fault:
            reason, wait = str(fault), fault.wait
        answered = part.answered
        if part.size > longest:
            longest, fruitless, pause = part.size, 0, patience.pause
        else:
            fruitless += 1
        if fruitless >= (patience.tries if answered else patience.first_tries):
            raise DownloadFault(f"{remote.address}: {reason}")
        time.sleep(min(max(pause, wait), patience.longest_pause))
        pause *= 2


def _transfer(remote: Remote, part: "_Part", patience: Patience) -> None:
    """One attempt to bring what is missing."""
    import requests
    from urllib3.exceptions import HTTPError

    have = part.size_for(remote)
    if have and have == part.total:  # an earlier process was ended before it gave the name
        part.continued = True
        return
    headers = {"Accept-Encoding": "identity"} | dict(remote.headers)
    if have:
        headers["Range"] = f"bytes={have}-"
        if part.validator:
            headers["If-Range"] = part.validator
    try:
        with requests.get(
            remote.address,
            headers=headers,
            stream=True,
            timeout=(patience.connect, patience.silence),
        ) as response:
            part.answered = True
            if _begin(response, remote, part, have):
                _receive(response, remote, part)
    except (requests.ConnectionError, requests.Timeout, HTTPError) as fault:
        raise _Interrupted(_in_short(fault)) from None
    except (requests.RequestException, ValueError) as fault:  # redirects without end or to no http
        raise DownloadFault(f"{remote.address}: {_in_short(fault)}") from None


def _begin(response: "Response", remote: Remote, part: "_Part", have: int) -> bool:
    """Check an answer before its body is read; False where nothing is missing any more.

    The part is then as long as the place where the body begins.
    """
    status = response.status_code
    if status == 416 and have:
        total = _total(response.headers.get("Content-Range", ""))
        if have == total and part.total in (None, total):
            return False
        part.discard()
        raise _Interrupted("is not as long as it said before")
    if status in PASSES:
        raise _Interrupted(f"answers {status}", _wait(response))
    if status == 206 and not have:
        raise DownloadFault(f"{remote.address}: sends a part of the file, unasked")
    if status not in (200, 206):
        reason = REASONS.get(status, response.reason)
        raise DownloadFault(f"{remote.address}: answers {status} ({reason})")
    validator = _validator(response)
    _check_body(response, remote)
    if status == 206:
        start, total = _place(response.headers.get("Content-Range", ""))
        same = validator in (None, part.validator) and part.total in (None, total)
        if start != have or not same:
            part.discard()
            raise _Interrupted("is another version than the part that is here")
        part.continued = True
        part.total = total
        return True
    total = _number(response.headers.get("Content-Length", ""))
    if remote.bytes is not None and total not in (None, remote.bytes):
        raise DownloadFault(f"{remote.address}: has {total:,} bytes, not {remote.bytes:,}")
    part.start(remote, validator, total)
    return True


def _check_body(response: "Response", remote: Remote) -> None:
    """Raise DownloadFault where a body is not the file, or its end could not be recognised."""
    facts = response.headers
    packed = facts.get("Content-Encoding", "identity").lower()
    if packed != "identity" and not remote.name.endswith(".gz"):  # some servers say so of a .gz
        raise DownloadFault(f"{remote.address}: sends the file packed ({packed}), unasked")
    if remote.sha256 is not None:
        return
    kind = facts.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "text/html" and not remote.name.endswith((".html", ".htm")):
        raise DownloadFault(f"{remote.address}: answers with a web page instead of the file")
    length = _number(facts.get("Content-Length", ""))
    has_an_end = length is not None or facts.get("Transfer-Encoding", "").lower() == "chunked"
    if not has_an_end and remote.bytes is None:
        raise DownloadFault(
            f"{remote.address}: does not say how long the file is, so a part could pass for all"
        )


def _receive(response: "Response", remote: Remote, part: "_Part") -> None:
    """Add the body to the part."""
    from urllib3.exceptions import ProtocolError

    most = remote.bytes if remote.bytes is not None else part.total
    with part.path.open("ab") as file, suppress(ProtocolError):
        while chunk := response.raw.read1(CHUNK, decode_content=False):
            file.write(chunk)
            part.size += len(chunk)
            part.advance(len(chunk))
            if most is not None and part.size > most:
                part.discard()
                raise DownloadFault(f"{remote.address}: sends more than {most:,} bytes")
        if part.size == part.total or part.total is None:
            return
    expected = "an unknown number of" if part.total is None else f"{part.total:,}"
    raise _Interrupted(f"ends after {part.size:,} of {expected} bytes")


def _validator(response: "Response") -> str | None:
    """What tells this version of a file from others: a strong ETag, or a date."""
    tag = response.headers.get("ETag")
    if tag and not tag.startswith("W/"):
        return tag
    return response.headers.get("Last-Modified")


def _place(content_range: str) -> tuple[int, int | None]:
    """First byte and size of the whole of `bytes 5-9/10`; (-1, None) for anything else."""
    try:
        first = int(content_range.removeprefix("bytes ").split("-")[0])
    except ValueError:
        return -1, None
    return first, _total(content_range)


def _total(content_range: str) -> int | None:
    return _number(content_range.rpartition("/")[2])


def _wait(response: "Response") -> float:
    """Seconds that a busy server asks for."""
    return float(_number(response.headers.get("Retry-After", "")) or 0)


def _number(text: str) -> int | None:
    """The number that a header holds; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _in_short(fault: Exception) -> str:
    """The innermost cause: requests wraps a fault in several others."""
    cause: Any = fault
    for _ in range(5):
        inner = getattr(cause, "reason", None) or next(
            (one for one in cause.args if isinstance(one, Exception)), None
        )
        if not isinstance(inner, Exception):
            break
        cause = inner
    line = (str(cause).splitlines() or [type(cause).__name__])[0]
    return CONNECTION.sub("", line)[:200]


class _Part:
    """What is here of a file, and of which version.

    size: its bytes; validator, total: of the version; continued: it comes from several attempts
    answered: whether any server has answered in this process
    """

    def __init__(self, path: Path, advance: Advance) -> None:
        self.final = path
        self.path = path.with_name(path.name + ".partial")
        self.note = path.with_name(path.name + ".partial.json")
        self.advance = advance
        self.size = 0
        self.validator: str | None = None
        self.total: int | None = None
        self.continued = False
        self.answered = False

    def size_for(self, remote: Remote) -> int:
        """The bytes from which a download can be continued; what is of no use is removed."""
        before = self.size
        usable = self._read_note(remote)
        if usable:
            self.size = self.path.stat().st_size
            self.advance(self.size - before)
        else:
            self.discard()
        return self.size

    def _read_note(self, remote: Remote) -> bool:
        """Whether the part is one of this file, and of a version that can be recognised."""
        try:
            note = json.loads(read_small(self.note, NOTE_BYTES))
            self.validator, self.total = note["validator"], note["total"]
            same = note["address"] == remote.address and self.path.is_file()
        except (OSError, ValueError, KeyError, TypeError):
            return False
        recognisable = self.validator is not None or remote.sha256 is not None
        return same and recognisable

    def start(self, remote: Remote, validator: str | None, total: int | None) -> None:
        """Begin a part of a version; an earlier one is removed first."""
        self.discard()
        self.validator, self.total = validator, total
        note = {"address": remote.address, "validator": validator, "total": total}
        write_text(self.note, json.dumps(note))

    def discard(self) -> None:
        self.advance(-self.size)
        self.size = 0
        self.continued = False
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the whole file its name."""
        if not self.path.exists():  # of no bytes
            self.path.touch()
        sync(self.path)
        os.replace(self.path, self.final)
        with suppress(OSError):
            self.note.unlink()
