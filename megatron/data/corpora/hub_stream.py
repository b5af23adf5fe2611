"""Any data set of the Hugging Face hub, read as a stream: no file is kept, no script is run."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.readers import Corpus
from megatron.errors import UserError, in_words
from megatron.files import sha256_of


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


class HubStream(Corpus):
    """The corpus of a data set of the hub, or of a folder in the hub's layout.

    folder: read this one, and nothing from the network
    Raises UserError: no network, no such data set, configuration, split or column.
    """

    def __init__(self, name: str, wanted: Wanted, folder: Path | None = None) -> None:
        super().__init__(name)
        self.wanted = wanted
        self.folder = folder
        self.commit: str | None = None
        if wanted.documents:
            self.about["documents_limit"] = wanted.documents
        if folder is None:
            from huggingface_hub import HfApi

            try:  # the same commit is read from beginning to end
                self.commit = HfApi().dataset_info(wanted.dataset, revision=wanted.revision).sha
            except Exception as fault:  # httpx has classes of its own
                raise self._unreadable(fault) from None

    def documents(self) -> Iterator[str]:
        """The text of each row, in the order of the files."""
        from datasets import load_dataset  # it takes seconds to import

        wanted = self.wanted
        key = wanted.text_key
        place = str(self.folder or wanted.dataset)
        try:
            rows = load_dataset(
                place, wanted.config, split=wanted.split, revision=self.commit, streaming=True
            )
            for number, row in enumerate(itertools.islice(rows, wanted.documents), 1):
                text = row.get(key)
                if not isinstance(text, str):
                    raise UserError(
                        f"--text-key: {wanted.dataset}: row {number} has no text in column {key!r},"
                        f" it has the columns {', '.join(row)} - choose another"
                    )
                yield text
        except UserError:
            raise
        except Exception as fault:  # datasets and the libraries for each kind of file have many
            raise self._unreadable(fault) from None

    def sources(self) -> list[dict[str, Any]]:
        """The data set with its commit, which fixes the text; a folder with all of its files."""
        entry: dict[str, Any] = self.wanted._asdict() | {"commit": self.commit}
        del entry["documents"]
        if self.folder is not None:
            files = sorted(path for path in self.folder.rglob("*") if path.is_file())
            names = [path.relative_to(self.folder) for path in files]
            entry["files"] = {
                name.as_posix(): sha256_of(self.folder / name)
                for name in names
                if not any(part.startswith(".") for part in name.parts)
            }
        # Of what was asked for: a stream has no file whose bytes could be summed.
        described = json.dumps(entry, sort_keys=True).encode()
        return [entry | {"sha256": hashlib.sha256(described).hexdigest()}]

    def _unreadable(self, fault: Exception) -> UserError:
        return UserError(
            f"hf:{self.wanted.dataset}: cannot be read ({in_words(fault)[:300]}) - check the name,"
            " --config, --split and --revision, start again where there is a network, or give a"
            " copy of its folder with --from-dir DIR; a data set that is made by a script is not"
            " run: download its files and give them with --input"
        )
