"""The Hugging Face hub: files of a data set, or any data set as a stream."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.data.readers import Corpus, text_of
from megatron.errors import UserError, in_words


@contextmanager
def asking(name: str, fix: str) -> Iterator[None]:
    """Raise UserError "hf:NAME: cannot be read (reason) - fix" if the hub fails."""
    try:
        yield
    except UserError:
        raise
    except Exception as fault:  # httpx, datasets and the file format libraries raise many kinds
        if isinstance(fault, OSError) and fault.errno is not None:  # of the disk
            raise
        raise UserError(f"hf:{name}: cannot be read ({in_words(fault)[:300]}) - {fix}") from None


class HubStream(Corpus):
    """The corpus of a data set on the hub. Its scripts are never run.

    config: one of its configurations; split: train, validation, test …; text_key: the columns
        that hold the text; the first that a row has is used
    revision: a branch, tag or commit; documents: the largest number of documents
    Raises UserError if there is no network, or no such data set, configuration, split or column.
    """

    fix = (
        "check the name, --config, --split, --revision and the network, or give files with --input"
    )

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

        with asking(dataset, self.fix):  # always read the same commit
            self.commit = HfApi().dataset_info(dataset, revision=revision).sha

    def documents(self) -> Iterator[str]:
        """The text of each row, in the order of the files."""
        from datasets import load_dataset  # importing it takes seconds

        with asking(self.dataset, self.fix):
            rows = load_dataset(
                self.dataset, self.config, split=self.split, revision=self.commit, streaming=True
            )
            for number, row in enumerate(itertools.islice(rows, self.limit), 1):
                yield text_of(row, self.keys, f"hf:{self.dataset}: row {number}")

    def sources(self) -> list[dict]:
        """The data set at its commit, which fixes the text."""
        entry = {
            "dataset": self.dataset,
            "split": self.split,
            "text_key": " or ".join(self.keys),
            "config": self.config,
            "revision": self.revision,
            "commit": self.commit,
        }
        # The sum of the request, because a stream has no file whose bytes we could sum.
        described = json.dumps(entry, sort_keys=True).encode()
        return [entry | {"sha256": hashlib.sha256(described).hexdigest()}]
