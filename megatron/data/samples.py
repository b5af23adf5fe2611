"""Train, valid and test samples of a token file, token for token those of GPT-NeoX (2022).

The order of documents and samples is stored on disk next to the data. One process per machine
builds the three arrays, one in memory at a time, while the others wait for its files.
"""

import hashlib
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.files import check_regular, folder_beside, sync
from megatron.splits import PARTS, SPLIT, parse_split, plain_sum

log = logging.getLogger(__name__)
DOCUMENTS = 1 << 20  # documents whose ends are computed at a time
FORMAT = 1  # part of the stored maps' name: raise it when they change


@dataclass(frozen=True)
class Plan:
    """Everything that index maps depend on, apart from the sizes of the documents."""

    documents: range
    tokens_per_epoch: int
    epochs: int
    length: int
    seed: int

    @property
    def samples(self) -> int:
        """Each sample shares a token with the next one, so the last one needs one more."""
        return (self.epochs * self.tokens_per_epoch - 1) // self.length


class IndexMaps(NamedTuple):
    """Three arrays, mapped from their files so that the ranks of a machine share the memory.

    documents: [epochs * documents] int32, in the order in which they are read
    ends: [epochs * documents] int64, number of tokens up to the end of each document
    order: [samples], numbers of the samples, shuffled
    """

    documents: NDArray
    ends: NDArray
    order: NDArray


class Samples:
    """Windows of length + 1 tokens over shuffled documents.

    Sample k of the stream starts at token k * length. `len` is one less than the number of samples,
    as in the reference. An index past the end is an IndexError; the reference silently starts over.
    """

    def __init__(self, tokens: TokenFile, maps: IndexMaps, length: int):
        self.tokens = tokens
        self.maps = maps
        self.length = length

    def __len__(self) -> int:
        return len(self.maps.order) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """[length + 1] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.read(index)

    def read(self, index: int) -> NDArray[np.int64]:
        """[length + 1] int64, of any index.

        A blend may need more samples than there are. As in the reference it gets the one that `len`
        leaves out, and then starts over.
        """
        if index > len(self):
            index %= len(self)
        documents, ends, order = self.maps
        token = int(order[index]) * self.length  # of the stream
        entry = int(np.searchsorted(ends, token, side="right"))
        start = token - int(ends[entry - 1] if entry else 0)  # in its document
        sample = np.empty(self.length + 1, dtype=np.int64)
        rest = sample  # the unfilled rest
        while len(rest):
            ids = self.tokens.read(int(documents[entry]), start, len(rest))
            rest[: len(ids)] = ids
            rest = rest[len(ids) :]
            entry += 1
            start = 0
        return sample


def build_split(
    tokens: TokenFile,
    split: str = SPLIT,
    part: str = "valid",
    length: int = 512,
    seed: int = 1234,
    num_samples: int = 1,
) -> Samples:
    """The samples of a part, over as many epochs as num_samples need.

    Raises UserError if the part is empty.
    """
    documents = split_documents(tokens, split, part)
    total = _tokens_of(tokens, documents)
    if not total:
        raise UserError(
            f"{tokens.prefix}: the {part} part has no tokens - give {part} a larger share than "
            f"split = {split}"
        )
    if part == "train":
        log.info("%s: %s", tokens.prefix, split_in_words(tokens, split))
    if total <= length:
        # As in the reference. In evaluation it flatters models that use distant tokens.
        log.warning(
            "%s: the %s part has only %d tokens, so samples of %d repeat the same text - enlarge"
            " its share in split = %s",
            *(tokens.prefix, part, total, length, split),
        )
    # At least two samples, because the last one is not counted.
    epochs = -(-(max(num_samples, 2) * length + 1) // total)
    plan = Plan(documents, total, epochs, length, seed)
    return Samples(tokens, _maps(tokens, plan), length)


def _tokens_of(tokens: TokenFile, documents: range) -> int:
    return int(tokens.sizes[documents.start : documents.stop].sum(dtype=np.int64))


def split_documents(tokens: TokenFile, split: str, part: str) -> range:
    """Documents of a part, in file order, with the reference's rounding.

    Raises UserError for a part without any.
    """
    if part not in PARTS:
        raise UserError(f"part: there is no part '{part}' - use one of {', '.join(PARTS)}")
    documents = _documents_of_parts(tokens, split)[part]
    if not documents:
        raise UserError(
            f"{tokens.prefix}: split {split} of {len(tokens)} documents leaves none for {part} "
            f"- give {part} a larger share, or prepare more documents"
        )
    return documents


def _documents_of_parts(tokens: TokenFile, split: str) -> dict[str, range]:
    weights = parse_split(split)
    total = plain_sum(weights)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / total * float(len(tokens))))
    surplus = bounds[-1] - len(tokens)  # the surplus from rounding
    # The reference subtracts the surplus from every bound except the first.
    bounds = [0, *(max(0, bound - surplus) for bound in bounds[1:])]
    return dict(zip(PARTS, map(range, bounds, bounds[1:]), strict=True))


def split_in_words(tokens: TokenFile, split: str) -> str:
    """Tokens and documents of every part."""
    words = []
    for part, documents in _documents_of_parts(tokens, split).items():
        size = _tokens_of(tokens, documents)
        words.append(f"{part} {size:,} tokens ({len(documents):,} documents)")
    return f"split {split}: {', '.join(words)}"


# --- The order of documents and of samples ---


def _write_maps(folder: Path, sizes: NDArray, plan: Plan) -> None:
    """Write documents.npy, ends.npy and order.npy; sizes: of all documents in the file.

    As in GPT-NeoX, one random stream shuffles the documents of all epochs together, then the
    samples.
    """
    # RandomState, not Generator: its stream never changes, and the reference uses it.
    random = np.random.RandomState(plan.seed)
    documents = np.arange(plan.documents.start, plan.documents.stop, dtype=np.int32)
    if plan.epochs > 1:
        documents = np.tile(documents, plan.epochs)
    random.shuffle(documents)
    np.save(folder / "documents.npy", documents)
    ends = np.lib.format.open_memmap(folder / "ends.npy", "w+", np.int64, documents.shape)
    for first in range(0, len(documents), DOCUMENTS):
        block = sizes[documents[first : first + DOCUMENTS]]
        before = ends[first - 1] if first else 0
        ends[first : first + DOCUMENTS] = before + np.cumsum(block, dtype=np.int64)
    ends.flush()
    del documents  # before there are samples
    # Like the reference, in 32 bits if they suffice.
    fits_in_32_bits = plan.samples < np.iinfo(np.uint32).max - 1
    order = np.arange(plan.samples, dtype=np.uint32 if fits_in_32_bits else np.int64)
    random.shuffle(order)
    np.save(folder / "order.npy", order)
    for file in folder.iterdir():
        sync(file)  # so that a crash cannot leave wrong contents


def _maps(tokens: TokenFile, plan: Plan) -> IndexMaps:
    """The maps in PREFIX_index_maps/<hash>; they are built if they are missing or damaged.

    If the folder is not writable, they are built in unnamed temporary files.
    """
    sizes = np.ascontiguousarray(tokens.sizes[plan.documents.start : plan.documents.stop])
    facts = f"{FORMAT} {plan}".encode() + hashlib.sha256(sizes.data).digest()
    home = tokens.prefix.with_name(tokens.prefix.name + "_index_maps")
    folder = home / hashlib.sha256(facts).hexdigest()[:16]
    if maps := _load(folder, plan):
        return maps
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{folder.name}.lock"):
            # Another process may have built them while this one waited.
            if maps := _load(folder, plan):
                return maps
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            with folder_beside(folder) as temporary:
                _write_maps(temporary, tokens.sizes, plan)
    except (OSError, NotImplementedError) as error:  # a file system without locks
        log.warning("index maps cannot be stored, so every start builds them again: %s", error)
    if maps := _load(folder, plan):
        return maps
    with tempfile.TemporaryDirectory() as unnamed:  # mapped files stay readable without a name
        _write_maps(Path(unnamed), tokens.sizes, plan)
        maps = _load(Path(unnamed), plan)
    assert maps is not None
    return maps


def _load(folder: Path, plan: Plan) -> IndexMaps | None:
    """The maps in a folder, or None if they are missing or damaged."""
    if not folder.is_dir():
        return None
    try:
        arrays = []
        for name in IndexMaps._fields:
            file = folder / f"{name}.npy"
            check_regular(file)
            arrays.append(np.load(file, mmap_mode="r", allow_pickle=False))
        documents, ends, order = arrays
        sizes = documents.shape, ends.shape, order.shape, int(ends[-1])
        entries = (len(plan.documents) * plan.epochs,)
        if sizes != (entries, entries, (plan.samples,), plan.epochs * plan.tokens_per_epoch):
            raise ValueError("they have other sizes")
    except (OSError, ValueError, EOFError) as error:
        log.warning("building the index maps in %s again: %s", folder, error)
        return None
    return IndexMaps(*arrays)
