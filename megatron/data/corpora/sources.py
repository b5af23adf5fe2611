"""The files of a source: which they are, where they go, and how all of them come there."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, model_validator
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron.data.corpora import hub
from megatron.data.corpora.download import DownloadFault, Patience, Remote, fetch
from megatron.errors import UserError
from megatron.files import read_small, sha256_of, write_text
from megatron.folder_lock import owned_folder
from megatron.parallel.machine import free_disk, in_bytes

log = logging.getLogger(__name__)

AT_ONCE = 4  # downloads
LISTED = {"hub", "revision", "files", "address_list", "base"}  # what of a source its list follows
LARGEST_LISTING = 1 << 26  # bytes; 60,000 files of a hub take 20 MB
NAME = re.compile(r"(?!\.)[^\x00-\x1f\\:]+")  # a part of a path


class Source(BaseModel):
    """A place that offers a corpus: a data set of a hub, or plain addresses.

    hub, revision, files: name of a data set, its version, and patterns of its files
    address_list, base: a file of the data set that lists addresses, and what goes before each
    urls: addresses of files
    bytes: of all files together; count: how many there are; sha256: where there is one file alone
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
        kinds = (
            bool(self.hub and self.files),
            bool(self.hub and self.address_list),
            bool(self.urls),
        )
        if sum(kinds) != 1:
            raise ValueError("needs hub with files, hub with address_list, or urls")
        if self.sha256 and self.files_expected != 1:
            raise ValueError("sha256: is for a source of one file")
        return self

    @property
    def files_expected(self) -> int | None:
        """How many files it has; None where that is not known."""
        wildcards = any(sign in name for name in self.files for sign in "*?[")
        if self.count is not None or self.address_list or wildcards:
            return self.count
        return len(self.urls) or len(self.files)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"the data set {self.hub}" if self.hub else self.urls[0]

    @property
    def folder(self) -> str:
        """Where its files go below the folder of downloads: the same for every corpus."""
        if self.hub:
            return self.hub.replace("/", "--")
        address = urlsplit(self.urls[0])
        return (address.hostname or "files") + str(PurePosixPath(address.path).parent).rstrip("/")


class Local:
    """A source whose files are, or will be, in a folder of downloads."""

    def __init__(self, source: Source, downloads: Path, patience: Patience | None = None) -> None:
        self.source = source
        self.folder = downloads / source.folder
        self.patience = patience

    def all_files(self, corpus: str) -> list[Path]:
        """Every file, downloaded where it is not here.

        Raises DownloadFault, and UserError where the disk is too small or refuses.
        """
        with owned_folder(self.folder, "-d"):
            remotes = self._listing()
            self._check_space(remotes, self.source.bytes)
            with _progress(corpus, remotes) as progress:
                self._fetch_all(remotes, progress)
        return [self.folder / remote.name for remote in remotes]

    def listing(self) -> list[Remote]:
        """The files of the source; those of the first time, so that no two versions are mixed.

        Raises DownloadFault.
        """
        with owned_folder(self.folder, "-d"):
            return self._listing()

    def is_whole(self) -> bool:
        """Whether every file was downloaded and is still here; nothing is asked of the network."""
        try:
            remotes = _of_urls(self.source) if self.source.hub is None else self._listed_before()
        except DownloadFault:
            return False
        return bool(remotes) and all(map(self._is_here, remotes))

    def one_file(self, corpus: str, remote: Remote) -> Path:
        """A file of the listing, downloaded where it is not here. Raises as all_files does."""
        with owned_folder(self.folder, "-d"):
            self._check_space([remote])
            with _progress(f"{corpus}: {remote.name}", [remote]) as progress:
                self._fetch_all([remote], progress)
        return self.folder / remote.name

    def _listing(self) -> list[Remote]:
        if self.source.hub is None:  # the recipe is the list
            return _checked(_look_up(self.source), self.source)
        if earlier := self._listed_before():
            return earlier
        described = self.source.model_dump(include=LISTED)
        path = self.folder / _listing_name(described)
        remotes = _checked(_look_up(self.source), self.source)
        self._remove_other_versions(remotes)
        entries = [
            {"address": one.address, "name": one.name, "bytes": one.bytes, "sha256": one.sha256}
            for one in remotes
        ]
        write_text(path, json.dumps({"source": described, "files": entries}, indent=1) + "\n")
        return remotes

    def _listed_before(self) -> list[Remote]:
        """The files of the list that an earlier download kept; none where there is no such list."""
        described = self.source.model_dump(include=LISTED)
        path = self.folder / _listing_name(described)
        try:
            earlier = json.loads(read_small(path, LARGEST_LISTING))
            if earlier["source"] == described:
                return _with_headers(self.source, earlier["files"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none yet, or damaged
        return []

    def _remove_other_versions(self, remotes: Sequence[Remote]) -> None:
        """Remove the files that are not proven to be those of a list that was made just now."""
        here = [remote for remote in remotes if (self.folder / remote.name).is_file()]
        if not here:
            return
        log.warning("%s: is listed anew; %d files are compared", self.folder, len(here))
        for remote in here:
            path = self.folder / remote.name
            if remote.sha256 is None or sha256_of(path) != remote.sha256:
                path.unlink()

    def _is_here(self, remote: Remote) -> bool:
        path = self.folder / remote.name
        if not path.is_file():
            return False
        return remote.bytes is None or path.stat().st_size == remote.bytes

    def _check_space(self, remotes: Sequence[Remote], together: int | None = None) -> None:
        """UserError where the disk is too small; together: bytes of files without known sizes."""
        needed = 0
        for remote in remotes:
            if not self._is_here(remote):
                part = self.folder / (remote.name + ".partial")
                needed += max(0, (remote.bytes or 0) - _size(part))
        if needed == 0 and together and not any(map(self._is_here, remotes)):
            needed = together
        free = free_disk(self.folder)
        if free is not None and free < needed:
            raise UserError(
                f"{self.folder}: needs {in_bytes(needed)} and has {in_bytes(free)} free - free some"
                " space, choose another disk with -d, or take less with --documents"
            )

    def _fetch_all(self, remotes: Sequence[Remote], progress: Progress) -> None:
        """Download what is not here, a few at a time; the first fault ends all."""
        task = progress.task_ids[0]
        stopped = False

        def advance(new: int) -> None:
            if stopped:
                raise DownloadFault("another file could not be had")
            progress.update(task, advance=new)

        def bring(remote: Remote) -> None:
            path = self.folder / remote.name
            if self._is_here(remote):
                advance(path.stat().st_size)
            elif not stopped:
                fetch(remote, path, self.patience, advance)

        threads, ended = _started(bring, remotes)
        try:
            for _ in remotes:
                if fault := ended.get():
                    raise fault
        except Exception:  # the next source may have the same folder
            stopped = True
            for thread in threads:
                thread.join()
            raise


def _started(
    bring: Callable[[Remote], None], remotes: Sequence[Remote]
) -> tuple[list[Thread], SimpleQueue[BaseException | None]]:
    """Threads that bring a few files at a time, and where each file's end or fault appears."""
    waiting = SimpleQueue[Remote]()
    for remote in remotes:
        waiting.put(remote)
    ended = SimpleQueue[BaseException | None]()

    def work() -> None:
        with suppress(Empty):
            while True:
                remote = waiting.get_nowait()
                try:
                    bring(remote)
                    ended.put(None)
                except BaseException as fault:  # for the thread that waits
                    ended.put(fault)

    # Daemons: ctrl-C does not wait for a server that is silent.
    threads = [Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(remotes)))]
    for thread in threads:
        thread.start()
    return threads, ended


def _listing_name(described: dict) -> str:
    """The file of a list: corpora whose files share a folder have lists of their own."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"listing-{digest[:8]}.json"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _progress(what: str, remotes: Sequence[Remote]) -> Iterator[Progress]:
    """A bar on stderr with MB/s, and the time left where the size is known."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    sizes = [remote.bytes for remote in remotes if remote.bytes is not None]
    total = sum(sizes) if len(sizes) == len(remotes) else None
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=total)
        yield progress


def _look_up(source: Source) -> list[Remote]:
    """The files of a source as it lists them now. Raises DownloadFault."""
    if source.hub is None:
        remotes = _of_urls(source)
    elif source.address_list is not None:
        lines = hub.text_of(source.hub, source.revision, source.address_list).split()
        remotes = [_of_address(source.base + line, source) for line in lines]
    else:
        remotes = _of_hub(source.hub, source)
    if source.files_expected not in (None, len(remotes)):
        raise DownloadFault(f"it lists {len(remotes)} files, not {source.files_expected}")
    return remotes


def _of_urls(source: Source) -> list[Remote]:
    remotes = [_of_address(address, source) for address in source.urls]
    if len(remotes) == 1 and source.bytes is not None:
        return [replace(remotes[0], bytes=source.bytes)]
    return remotes


def _of_hub(name: str, source: Source) -> list[Remote]:
    remotes = hub.files_of(name, source.revision, source.files)
    if source.sha256 is not None:
        remotes = [_as_in_recipe(remote, source.sha256) for remote in remotes]
    by_name = {remote.name: remote for remote in remotes}
    return [by_name[one] for one in matching(by_name, source.files)]


def _as_in_recipe(remote: Remote, sha256: str) -> Remote:
    if remote.sha256 not in (None, sha256):
        raise DownloadFault(f"{remote.name} has another sha256 there than in the recipe")
    return replace(remote, sha256=sha256)


def _of_address(address: str, source: Source) -> Remote:
    name = PurePosixPath(unquote(urlsplit(address).path)).name
    if source.base:  # names of several folders may be alike
        name = address.removeprefix(source.base)
    if urlsplit(address).scheme not in ("http", "https"):
        raise DownloadFault(f"{address} is no web address")
    return Remote(address, name, sha256=source.sha256)


def _checked(remotes: list[Remote], source: Source) -> list[Remote]:
    """The files, if their names are names: a list from elsewhere may not name files outside."""
    if not remotes:
        raise DownloadFault(f"{source.title} has no files {' '.join(source.files)}".rstrip())
    names = set()
    for remote in remotes:
        parts = remote.name.split("/")
        if not all(NAME.fullmatch(part) for part in parts):
            raise DownloadFault(f"{source.title} lists {remote.name!r}, which is no file's name")
        if remote.name in names:
            raise DownloadFault(f"{source.title} lists two files {remote.name!r}")
        names.add(remote.name)
    return remotes


def _with_headers(source: Source, entries: Sequence[dict]) -> list[Remote]:
    remotes = [Remote(**entry) for entry in entries]
    if source.hub is None or source.address_list is not None:
        return remotes
    headers = hub.headers()
    return [replace(one, headers=headers) for one in remotes]


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
