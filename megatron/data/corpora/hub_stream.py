"""Any data set of the Hugging Face hub, read as a stream: no file is kept, no script is run."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import UserError, did_you_mean
from megatron.files import sha256_of
from megatron.network import hub, hub_is_reachable


class Wanted(NamedTuple):
    """A data set and what is read of it.

    config: one of its configurations; split: train, validation, test …; text_key: the column
    revision: a branch, tag or commit; documents: so many at most
    """

    dataset: str
    split: str = "train"
    text_key: str = "text"
    config: str | None = None
    revision: str = "main"
    documents: int | None = None


class HubStream:
    """The corpus of a data set of the hub, or of a folder in the hub's layout.

    folder: read this one, and nothing from the network
    Raises UserError: no network, no such data set, configuration, split or column.
    """

    def __init__(self, name: str, wanted: Wanted, folder: Path | None = None) -> None:
        self.name = name
        self.wanted = wanted
        self.folder = folder
        self.skipped = 0
        self.skips: dict[str, int] = {}
        self._taken = 0  # documents
        self.to_train_on: int | None = None
        self.about: dict[str, Any] = {}
        if wanted.documents:
            self.about["documents_limit"] = wanted.documents
        if folder is None:
            self._place, self._commit = wanted.dataset, _commit(wanted)
        elif folder.is_dir():
            self._place, self._commit = str(folder), None
        else:
            raise UserError(f"--from-dir: {folder} is no folder - give the one with the files")

    def documents(self) -> Iterator[str]:
        """The text of each row, in the order of the files."""
        key = self.wanted.text_key
        for number, row in enumerate(self._rows(), 1):
            if key not in row:
                hint = did_you_mean(key, row)
                raise UserError(
                    f"--text-key: {self.wanted.dataset} has no column {key!r} - "
                    f"{hint + ' ' if hint else ''}Its columns are {', '.join(row)}"
                )
            text = row[key]
            if not isinstance(text, str):
                raise UserError(
                    f"{self.wanted.dataset}: row {number}: {key!r} is {type(text).__name__}, not"
                    " text - choose another column with --text-key"
                )
            self._taken = number
            yield text

    def sources(self) -> list[dict[str, Any]]:
        """The data set with its commit, which fixes the text; a folder with all of its files."""
        entry: dict[str, Any] = self.wanted._asdict() | {"commit": self._commit}
        del entry["documents"]
        if self.folder is not None:
            entry["files"] = {
                path.relative_to(self.folder).as_posix(): sha256_of(path) for path in self._files()
            }
        # Of what was asked for: a stream has no file whose bytes could be summed.
        described = json.dumps(entry, sort_keys=True).encode()
        return [entry | {"sha256": hashlib.sha256(described).hexdigest()}]

    def identity(self) -> Any:
        """The data set with its commit; a folder with the sizes and times of its files."""
        facts: dict[str, Any] = self.wanted._asdict() | {"commit": self._commit}
        for path in self._files():
            facts[str(path)] = [path.stat().st_size, path.stat().st_mtime_ns]
        return facts

    def fraction(self) -> float | None:
        """The share of the documents that were asked for."""
        return self._taken / self.wanted.documents if self.wanted.documents else None

    def _files(self) -> list[Path]:
        """The files of the folder, without those that are hidden."""
        folder = self.folder
        if folder is None:
            return []
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [path for path in files if not _is_hidden(path.relative_to(folder))]

    def _rows(self) -> Iterator[dict[str, Any]]:
        from datasets import load_dataset  # it takes seconds to import

        wanted = self.wanted
        try:
            rows = load_dataset(
                self._place,
                wanted.config,
                split=wanted.split,
                revision=self._commit,
                streaming=True,
            )
            yield from itertools.islice(rows, wanted.documents)
        except UserError:
            raise
        except Exception as fault:  # datasets and the libraries for each kind of file have many
            raise _explained(fault, wanted) from None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _commit(wanted: Wanted) -> str:
    """The commit that a revision names now: the same one is read from beginning to end."""
    if not hub_is_reachable():
        raise UserError(
            f"hf:{wanted.dataset}: {hub()} cannot be reached - start again where there is a"
            " network, or give a copy of the data set's folder with --from-dir DIR"
        )
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(wanted.dataset, revision=wanted.revision).sha
    except (OSError, ValueError, RuntimeError) as fault:
        raise _explained(fault, wanted) from None
    return commit or wanted.revision


def _explained(fault: Exception, wanted: Wanted) -> UserError:
    """One message for a fault of the libraries."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    reason = (lines or [repr(fault)])[0][:300]
    name = f"hf:{wanted.dataset}"
    if isinstance(fault, RevisionNotFoundError):
        return UserError(f"--revision: {name} has no {wanted.revision} - give a branch or a commit")
    if isinstance(fault, RepositoryNotFoundError):
        return UserError(f"{name}: the hub has no such data set, or you need rights to read it")
    if "Bad split" in reason or "Unknown split" in reason:
        return UserError(f"--split: {name}: {reason}")
    if "BuilderConfig" in reason or "Config name is missing" in reason:
        return UserError(f"--config: {name}: {reason}")
    if "scripts are no longer supported" in reason:
        return UserError(
            f"{name}: is made by a script, which is not run - download its files, and give them"
            " with --input"
        )
    return UserError(f"{name}: cannot be read ({reason}) - check the name, --config and --split")
