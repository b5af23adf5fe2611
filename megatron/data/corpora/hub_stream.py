"""Any data set of the Hugging Face hub, read as a stream: no file is kept, no script is run."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence

from megatron.data.readers import Corpus, text_of
from megatron.errors import UserError, in_words


class HubStream(Corpus):
    """The corpus of a data set of the hub.

    config: one of its configurations; split: train, validation, test …; text_key: the columns
        that hold the text, the first that a row has
    revision: a branch, tag or commit; documents: so many at most
    Raises UserError: no network, no such data set, configuration, split or column.
    """

    def __init__(
        self,
        name: str,
        dataset: str,
        split: str = "train",
        text_key: Sequence[str] = ("text",),
        config: str | None = None,
        revision: str = "main",
        documents: int | None = None,
    ) -> None:
        super().__init__(name)
        self.dataset = dataset
        self.split = split
        self.keys = text_key
        self.config = config
        self.revision = revision
        self.limit = documents
        if documents:
            self.about["documents_limit"] = documents
        from huggingface_hub import HfApi

        try:  # the same commit is read from beginning to end
            self.commit = HfApi().dataset_info(dataset, revision=revision).sha
        except Exception as fault:  # httpx has classes of its own
            raise self._unreadable(fault) from None

    def documents(self) -> Iterator[str]:
        """The text of each row, in the order of the files."""
        from datasets import load_dataset  # it takes seconds to import

        try:
            rows = load_dataset(
                self.dataset, self.config, split=self.split, revision=self.commit, streaming=True
            )
            for number, row in enumerate(itertools.islice(rows, self.limit), 1):
                yield text_of(row, self.keys, f"hf:{self.dataset}: row {number}")
        except UserError:
            raise
        except Exception as fault:  # datasets and the libraries for each kind of file have many
            raise self._unreadable(fault) from None

    def sources(self) -> list[dict]:
        """The data set with its commit, which fixes the text."""
        entry = {
            "dataset": self.dataset,
            "split": self.split,
            "text_key": " or ".join(self.keys),
            "config": self.config,
            "revision": self.revision,
            "commit": self.commit,
        }
        # Of what was asked for: a stream has no file whose bytes could be summed.
        described = json.dumps(entry, sort_keys=True).encode()
        return [entry | {"sha256": hashlib.sha256(described).hexdigest()}]

    def _unreadable(self, fault: Exception) -> UserError:
        return UserError(
            f"hf:{self.dataset}: cannot be read ({in_words(fault)[:300]}) - check the name,"
            " --config, --split and --revision, start again where there is a network, or give its"
            " files with --input, as for a data set that is made by a script, which is not run"
        )
