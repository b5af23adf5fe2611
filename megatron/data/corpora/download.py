"""Files of the network: listed, downloaded, checked, and only then given their names.

huggingface_hub brings the bytes, of other addresses too. What is left here is its place and sum.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict

from megatron.errors import UserError, cannot_write, in_words
from megatron.files import sha256_of, sync, write_text
from megatron.folder_lock import owned_folder
from megatron.parallel.machine import free_disk, in_bytes

LISTED = {"hub", "revision", "files", "address_list", "base"}  # what of a source its list follows
NAME = re.compile(r"(?!\.)[^\x00-\x1f\\:]+")  # a part of a path
WEB_PAGE = re.compile(rb"\s*<(!doctype )?html", re.IGNORECASE)


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


def fetch(remote: Remote, path: Path, **headers: str) -> None:
    """Bring a file to its place.

    NAME.partial grows beside it. What an earlier process left of it is continued if size and sha256
    are known, which show a wrong joint.
    headers: more of the request's
    Raises DownloadFault with the reason, and UserError if the disk refuses.
    """
    from huggingface_hub.file_download import http_get  # here, because it takes long to import

    part = path.with_name(path.name + ".partial")
    can_go_on = remote.bytes is not None and remote.sha256 is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = part.stat().st_size if can_go_on and part.is_file() else 0
        with part.open("ab" if before else "wb") as file:
            http_get(
                remote.address,
                file,
                resume_size=before,
                headers={"Accept-Encoding": "identity", **headers},
                expected_size=remote.bytes,
            )
        can_go_on = False
        if remote.sha256 is None:  # without a sum, no web page may pass for the file
            with part.open("rb") as file:
                fault = WEB_PAGE.match(file.read(100)) and "the answer is a web page"
        else:
            fault = sha256_of(part) != remote.sha256 and "the answer has another sha256"
        if not fault:
            sync(part)
            part.replace(path)
            return
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise cannot_write(path, error) from None
        fault = in_words(error)[:200]
    except Exception as error:  # httpx has classes of its own
        fault = in_words(error)[:200]
    if not can_go_on or part.stat().st_size >= (remote.bytes or 0):
        part.unlink()
    raise DownloadFault(f"{remote.address}: {fault}")


# --- The files of a source ---


class Source(BaseModel):
    """A place that offers a corpus: a hub with files or an address_list, or urls.

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

    def listing(self, downloads: Path) -> list[Remote]:
        """Its files. Those of a hub are kept as first listed, so that no two versions are mixed.

        Raises DownloadFault.
        """
        if self.hub is None:
            size = self.bytes if len(self.urls) == 1 else None
            return [Remote(url, _name_in(url), size, self.sha256) for url in self.urls]
        listing: dict = {"source": self.model_dump(include=LISTED)}
        text = json.dumps(listing["source"], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = self.folder(downloads) / f"listing-{digest[:8]}.json"
        if path.is_file():
            return [Remote(**entry) for entry in json.loads(path.read_bytes())["files"]]
        try:
            remotes = self._ask_hub(self.hub)
        except Exception as fault:  # httpx has classes of its own
            raise DownloadFault(f"the hub does not answer: {in_words(fault)[:200]}") from None
        names = [remote.name for remote in remotes]
        for name in names:
            # A list from elsewhere may not name files outside.
            if not all(map(NAME.fullmatch, name.split("/"))):
                raise DownloadFault(f"{self.title} lists {name!r}")
        if len({*names}) < len(names):
            raise DownloadFault(f"{self.title} lists 'a name twice'")
        if not names or self.count not in (None, len(names)):
            raise DownloadFault(f"{self.title} lists {len(names)} files, not {self.count}")
        listing["files"] = [remote._asdict() for remote in remotes]
        write_text(path, json.dumps(listing, indent=1) + "\n")
        return remotes

    def _ask_hub(self, name: str) -> list[Remote]:
        """The files of a data set at the commit that its revision names now."""
        from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
        from huggingface_hub.hf_api import RepoFile

        commit = HfApi().dataset_info(name, revision=self.revision).sha
        if self.address_list:
            lines = hf_hub_download(name, self.address_list, repo_type="dataset", revision=commit)
            paths = Path(lines).read_text(encoding="utf-8").split()
            if self.base:  # names of several folders may be alike
                return [Remote(self.base + path, path) for path in paths]
            return [Remote(path, _name_in(path)) for path in paths]

        tree = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        remotes = []
        for path in matching(files, self.files):
            address = hf_hub_url(name, path, repo_type="dataset", revision=commit)
            file = files[path]
            sha256 = self.sha256 or (file.lfs.sha256 if file.lfs else None)
            remotes.append(Remote(address, path, file.size, sha256))
        return remotes


def _name_in(address: str) -> str:
    return PurePosixPath(unquote(urlsplit(address).path)).name


def download(source: Source, remotes: Sequence[Remote], downloads: Path) -> list[Path]:
    """The files on this machine, downloaded one after another if they are not here.

    Raises DownloadFault, and UserError if the disk is too small or refuses.
    """
    folder = source.folder(downloads)
    missing = [remote for remote in remotes if not (folder / remote.name).is_file()]
    if missing:
        with owned_folder(folder, "-d"):
            needed = sum(remote.bytes or 0 for remote in missing) or source.bytes or 0
            needed -= sum(part.stat().st_size for part in folder.rglob("*.partial"))
            free = free_disk(folder)
            if free is not None and free < needed:
                raise UserError(
                    f"{folder}: needs {in_bytes(needed)} and has {in_bytes(free)} free - free some"
                    " space, choose another disk with -d, or take less with --documents"
                )
            headers = {}
            if source.hub and not source.address_list:
                from huggingface_hub.utils import build_hf_headers

                headers = build_hf_headers()  # with the user's token, if there is one
            for remote in missing:
                fetch(remote, folder / remote.name, **headers)
    return [folder / remote.name for remote in remotes]


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern, by the first that each fits, and then by name.

    A pattern fits the end of a path. Where none does, patterns lose their folders, so that files
    may have been copied anywhere; where one does, a file of another folder is another file.
    """
    names = sorted(names)
    without_folders = [pattern.rpartition("/")[2] for pattern in patterns]
    for ends in (patterns, without_folders):
        matches = [name for end in ends for name in names if fnmatchcase(f"/{name}", f"*/{end}")]
        if matches:
            return list(dict.fromkeys(matches))
    return []
