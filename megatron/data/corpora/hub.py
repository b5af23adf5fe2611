"""Data sets of the Hugging Face hub: their files, with sizes and checksums.

huggingface_hub lists them. Their bytes come as those of any other address do (download.py): its own
download begins again after its process has ended.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from megatron.data.corpora.download import DownloadFault, Remote
from megatron.network import hub, hub_is_reachable


def headers() -> Mapping[str, str]:
    """What the hub wants to see of a client, with the user's token where there is one."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers()


def files_of(name: str, revision: str, patterns: Sequence[str]) -> list[Remote]:
    """The files of a data set that fit patterns, at the commit that a revision names now.

    Raises DownloadFault.
    """
    _check_reachable()
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    of_all = headers()
    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
        found = []
        for entry in _entries(name, commit, patterns):
            fits = isinstance(entry, RepoFile) and _fits(entry.path, patterns)
            if not fits or not isinstance(entry, RepoFile):
                continue
            address = hf_hub_url(name, entry.path, repo_type="dataset", revision=commit)
            sha256 = entry.lfs.sha256 if entry.lfs else None
            found.append(Remote(address, entry.path, entry.size, sha256, of_all))
    except (OSError, ValueError, RuntimeError) as fault:
        raise DownloadFault(_in_short(fault)) from None
    return found


def text_of(name: str, revision: str, path: str) -> str:
    """A small text file of a data set. Raises DownloadFault."""
    _check_reachable()
    from huggingface_hub import hf_hub_download

    try:
        local = hf_hub_download(name, path, repo_type="dataset", revision=revision)
        with open(local, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError, RuntimeError) as fault:
        raise DownloadFault(_in_short(fault)) from None


def _entries(name: str, commit: str | None, patterns: Sequence[str]) -> Iterator[object]:
    """What lies in the folders that patterns name; the whole data set may have 100,000 files."""
    from huggingface_hub import HfApi

    for folder in sorted({_fixed_folder(pattern) for pattern in patterns}):
        yield from HfApi().list_repo_tree(
            name, folder or None, recursive=True, revision=commit, repo_type="dataset"
        )


def _fixed_folder(pattern: str) -> str:
    """The folders of a pattern before its first wildcard."""
    folders = pattern.split("/")[:-1]
    fixed = []
    for folder in folders:
        if any(sign in folder for sign in "*?["):
            break
        fixed.append(folder)
    return "/".join(fixed)


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _check_reachable() -> None:
    if not hub_is_reachable():
        raise DownloadFault(f"{hub()} cannot be reached")


def _in_short(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return (lines or [repr(fault)])[0][:200]
