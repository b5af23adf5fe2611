"""Files of the network: listed, downloaded, checked, and only then given their names.

huggingface_hub lists the files of a data set. Their bytes come as those of any other address: its
own download begins again after its process has ended.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, model_validator
from tqdm import tqdm

from megatron.errors import UserError, cannot_write, in_words
from megatron.files import sha256_of, sync, write_text
from megatron.folder_lock import owned_folder
from megatron.network import hub, hub_is_reachable
from megatron.parallel.machine import free_disk, in_bytes

CHUNK = 1 << 16  # bytes
AT_ONCE = 4  # downloads
TRIES = 5  # attempts in a row that bring nothing
PAUSE = 1.0  # seconds before the second attempt; it doubles
TIMEOUT = (10.0, 60.0)  # seconds until a connection stands, and between two packets
PASSES = (408, 425, 429)  # answers below 500 that may be another one soon
LISTED = {"hub", "revision", "files", "address_list", "base"}  # what of a source its list follows
NAME = re.compile(r"(?!\.)[^\x00-\x1f\\:]+")  # a part of a path


class DownloadFault(Exception):
    """Why a file cannot be had from a source; its text is the reason."""


class Remote(NamedTuple):
    """A file that is wanted.

    name: its path below the folder of its source; bytes, sha256: None if they are not known
    """

    address: str
    name: str
    bytes: int | None = None
    sha256: str | None = None


def fetch(
    remote: Remote,
    path: Path,
    headers: Mapping[str, str] | None = None,
    advance: Callable[[int], object] = int,
) -> None:
    """Bring a file to its place.

    NAME.partial grows beside it. What an earlier process left of it is continued if a sha256 is
    known, which shows a wrong joint.
    headers: what the server wants to see; advance: called with the number of new bytes
    Raises DownloadFault with the reason, and UserError if the disk refuses.
    """
    from requests import RequestException  # here, because it takes long to import
    from urllib3.exceptions import HTTPError

    part = path.with_name(path.name + ".partial")
    fruitless = wrong = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            before = part.stat().st_size if remote.sha256 and part.is_file() else 0
            try:
                _receive(remote, part, before, headers or {}, advance)
            except (RequestException, HTTPError, ValueError) as fault:
                answer = getattr(fault, "response", None)
                status = 500 if answer is None else answer.status_code
                grows = remote.sha256 and part.is_file() and part.stat().st_size > before
                fruitless = 0 if grows else fruitless + 1
                if fruitless == TRIES or (status < 500 and status not in PASSES):
                    reason = f"answers {status}" if answer is not None else in_words(fault)
                    raise DownloadFault(f"{remote.address}: {reason[:200]}") from None
                time.sleep(PAUSE * 2**fruitless)
                continue
            difference = None
            if remote.bytes not in (None, part.stat().st_size):
                difference = f"{part.stat().st_size:,} bytes, not {remote.bytes:,}"
            elif remote.sha256 not in (None, found := sha256_of(part)):
                difference = f"the sha256 {found[:12]}…, not {str(remote.sha256)[:12]}…"
            if difference is None:
                break
            part.unlink()
            wrong += 1
            if not before or wrong == 2:  # a joint of two versions is tried once more
                raise DownloadFault(f"{remote.name} has {difference}; what came was removed")
        sync(part)
        part.replace(path)
    except OSError as fault:  # of the disk
        raise cannot_write(path, fault) from None


def _receive(
    remote: Remote,
    part: Path,
    have: int,
    headers: Mapping[str, str],
    advance: Callable[[int], object],
) -> None:
    """One attempt to bring the bytes that follow the first `have`."""
    import requests

    if have and have == remote.bytes:  # an earlier process was ended before it gave the name
        return
    asked = {"Accept-Encoding": "identity"} | dict(headers)
    if have:
        asked["Range"] = f"bytes={have}-"
    with requests.get(remote.address, headers=asked, stream=True, timeout=TIMEOUT) as response:
        if response.status_code == 416 and have:  # nothing follows
            return
        response.raise_for_status()
        facts = response.headers
        if remote.sha256 is None:
            # Without a sum, neither a web page nor a part may pass for the file.
            has_end = "Content-Length" in facts or "chunked" in facts.get("Transfer-Encoding", "")
            is_page = facts.get("Content-Type", "").startswith("text/html")
            if is_page or not (has_end or remote.bytes):
                raise DownloadFault(
                    f"{remote.address}: answers with a web page, or without the file's length"
                )
        is_continued = response.status_code == 206
        with part.open("ab" if is_continued else "wb") as file:
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                advance(len(chunk))


# --- The files of a source ---


class Source(BaseModel):
    """A place that offers a corpus: a data set of a hub, or plain addresses.

    hub, revision, files: name of a data set, its version, and patterns of its files
    address_list, base: a file of the data set that lists addresses, and what goes before each
    urls: addresses of files
    bytes: of all files together; count: how many there are; sha256: of a file that is alone
    tried: when it was last seen to work, or "not tried"
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: str | None = None
    revision: str = "main"
    files: list[str] = []
    address_list: str | None = None
    base: str = ""
    urls: list[str] = []
    bytes: int | None = None
    count: int | None = None
    sha256: str | None = None
    tried: str
    note: str = ""

    @model_validator(mode="after")
    def _one_kind(self) -> "Source":
        kinds = (self.hub and self.files, self.hub and self.address_list, self.urls)
        if sum(map(bool, kinds)) != 1:
            raise ValueError("needs hub with files, hub with address_list, or urls")
        return self

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"the data set {self.hub}" if self.hub else self.urls[0]

    @property
    def names(self) -> list[str]:
        """Names of its files, or patterns of them."""
        return [url.rpartition("/")[2] for url in self.urls] or self.files

    def folder(self, downloads: Path) -> Path:
        """Where its files go below the folder of downloads: the same for every corpus."""
        if self.hub:
            return downloads / self.hub.replace("/", "--")
        address = urlsplit(self.urls[0])
        return downloads / f"{address.hostname}{PurePosixPath(address.path).parent}".rstrip("/")

    def listing(self, downloads: Path, *, ask: bool = True) -> list[Remote]:
        """Its files. Those of a hub are kept as first listed, so that no two versions are mixed.

        ask: without it nothing is asked of the network, and what was never listed has no files
        Raises DownloadFault.
        """
        if self.hub is None:
            return [
                Remote(url, PurePosixPath(unquote(urlsplit(url).path)).name, sha256=self.sha256)
                for url in self.urls
            ]
        described = self.model_dump(include=LISTED)
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        path = self.folder(downloads) / f"listing-{digest[:8]}.json"
        if path.is_file():
            return [Remote(**entry) for entry in json.loads(path.read_bytes())["files"]]
        if not ask:
            return []
        remotes = self._look_up()
        names = {remote.name for remote in remotes}
        odd = [name for name in names if not all(map(NAME.fullmatch, name.split("/")))]
        if odd or len(names) < len(remotes):  # a list from elsewhere may not name files outside
            raise DownloadFault(f"{self.title} lists {(odd or ['a name twice'])[0]!r}")
        if not remotes or self.count not in (None, len(remotes)):
            raise DownloadFault(f"{self.title} lists {len(remotes)} files, not {self.count}")
        files = [remote._asdict() for remote in remotes]
        write_text(path, json.dumps({"source": described, "files": files}, indent=1) + "\n")
        return remotes

    def _look_up(self) -> list[Remote]:
        """The files of a data set at the commit that its revision names now."""
        if not hub_is_reachable():
            raise DownloadFault(f"{hub()} cannot be reached")
        from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
        from huggingface_hub.hf_api import RepoFile

        name = self.hub or ""
        try:
            commit = HfApi().dataset_info(name, revision=self.revision).sha
            if self.address_list:
                lines = hf_hub_download(
                    name, self.address_list, repo_type="dataset", revision=commit
                )
                paths = Path(lines).read_text(encoding="utf-8").split()
                if self.base:  # names of several folders may be alike
                    return [Remote(self.base + path, path) for path in paths]
                return [Remote(path, PurePosixPath(urlsplit(path).path).name) for path in paths]
            files: dict[str, RepoFile] = {}
            # The folders before a wildcard: the whole data set may have 100,000 files.
            for folder in {
                re.split(r"[^/]*[*?\[]", one)[0].rpartition("/")[0] for one in self.files
            }:
                for entry in HfApi().list_repo_tree(
                    name, folder or None, recursive=True, revision=commit, repo_type="dataset"
                ):
                    if isinstance(entry, RepoFile):
                        files[entry.path] = entry
        except (OSError, ValueError, RuntimeError) as fault:
            raise DownloadFault(in_words(fault)[:200]) from None
        remotes = []
        for path in matching(files, self.files):
            address = hf_hub_url(name, path, repo_type="dataset", revision=commit)
            lfs = files[path].lfs
            sha256 = self.sha256 or (lfs.sha256 if lfs else None)
            remotes.append(Remote(address, path, files[path].size, sha256))
        return remotes


def download(corpus: str, source: Source, remotes: Sequence[Remote], downloads: Path) -> list[Path]:
    """The files on this machine, downloaded if they are not here, a few at a time.

    Raises DownloadFault, and UserError if the disk is too small or refuses.
    """
    folder = source.folder(downloads)
    missing = [remote for remote in remotes if not (folder / remote.name).is_file()]
    if missing:
        with owned_folder(folder, "-d"):
            _fetch_all(corpus, source, missing, folder)
    return [folder / remote.name for remote in remotes]


def _fetch_all(corpus: str, source: Source, remotes: Sequence[Remote], folder: Path) -> None:
    needed = sum(remote.bytes or 0 for remote in remotes) or source.bytes or 0
    needed -= sum(part.stat().st_size for part in folder.rglob("*.partial"))
    free = free_disk(folder)
    if free is not None and free < needed:
        raise UserError(
            f"{folder}: needs {in_bytes(needed)} and has {in_bytes(free)} free - free some"
            " space, choose another disk with -d, or take less with --documents"
        )
    headers: Mapping[str, str] = {}
    if source.hub and not source.address_list:
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers()  # with the user's token, if there is one
    stopped = threading.Event()
    bar = tqdm(desc=corpus, total=needed or None, unit="B", unit_scale=True, disable=None)

    def advance(new: int) -> None:
        if stopped.is_set():
            raise DownloadFault("another file could not be had")
        bar.update(new)

    def bring(remote: Remote) -> None:
        advance(0)
        fetch(remote, folder / remote.name, headers, advance)

    with bar, ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            list(pool.map(bring, remotes))
        finally:
            stopped.set()  # also by ctrl-C: the other downloads end with their next bytes


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern, by the first that each fits, and then by name.

    A pattern fits the end of a path. Where none does, patterns lose their folders, so that files
    may have been copied anywhere; where one does, a file of another folder is another file.
    """
    known = sorted(names)
    for wanted in (patterns, [pattern.rpartition("/")[2] for pattern in patterns]):
        found: dict[str, None] = {}
        for pattern in wanted:
            ends = [name for name in known if fnmatchcase(f"/{name}", f"*/{pattern}")]
            found |= dict.fromkeys(ends)
        if found:
            return list(found)
    return []
