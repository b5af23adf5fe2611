"""Which document comes when, and in which order samples are drawn: built with numpy, kept on disk beside the data."""

import hashlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokens import TokenFile

log = logging.getLogger(__name__)
FORMAT = 1  # part of the cache's name: raise it when the maps below change


@dataclass(frozen=True)
class Plan:
    """Everything that index maps depend on, besides the sizes of the documents."""

    documents: range
    tokens_per_epoch: int
    epochs: int
    length: int
    seed: int

    @property
    def samples(self) -> int:
        """Samples share one token with the next, the last one needs one more."""
        return (self.epochs * self.tokens_per_epoch - 1) // self.length


@dataclass(frozen=True)
class IndexMaps:
    """documents [epochs * documents] int32: in the order they are read; ends, same shape, int64: tokens up to the end
    of each; order [samples]: the samples, shuffled."""

    documents: NDArray
    ends: NDArray
    order: NDArray


def index_maps(tokens: TokenFile, plan: Plan, *, cache: bool = True) -> IndexMaps:
    """The maps of a plan, mapped from PREFIX_index_maps/<hash> where that can be read or written, else in memory."""
    if not cache:
        return build_maps(tokens.sizes, plan)
    folder = tokens.prefix.with_name(tokens.prefix.name + "_index_maps") / _fingerprint(
        tokens, plan
    )
    damaged = folder.is_dir()
    if maps := _load(folder, plan):
        return maps
    maps = build_maps(tokens.sizes, plan)
    if damaged:
        shutil.rmtree(folder, ignore_errors=True)
    _save(folder, maps)
    return _load(folder, plan) or maps  # mapped, so that the ranks of a machine share the memory


def build_maps(sizes: NDArray, plan: Plan) -> IndexMaps:
    """As GPT-NeoX: one stream shuffles the documents of all epochs together, then the samples. sizes [documents]."""
    # RandomState, not Generator: its stream is frozen, and the reference draws from it.
    random = np.random.RandomState(plan.seed)
    documents = np.tile(
        np.arange(plan.documents.start, plan.documents.stop, dtype=np.int32), plan.epochs
    )
    random.shuffle(documents)
    ends = np.cumsum(sizes[documents], dtype=np.int64)
    order = np.arange(
        plan.samples, dtype=np.uint32 if plan.samples < np.iinfo(np.uint32).max - 1 else np.int64
    )
    random.shuffle(order)
    return IndexMaps(documents, ends, order)


def _fingerprint(tokens: TokenFile, plan: Plan) -> str:
    part = tokens.sizes[plan.documents.start : plan.documents.stop]
    facts = f"{FORMAT} {plan}".encode()
    return hashlib.sha256(facts + hashlib.sha256(part.tobytes()).digest()).hexdigest()[:16]


def _load(folder: Path, plan: Plan) -> IndexMaps | None:
    """The maps in a folder, or None if they are not there or not whole."""
    if not folder.is_dir():
        return None
    try:
        maps = IndexMaps(
            *(
                np.load(folder / f"{f.name}.npy", mmap_mode="r", allow_pickle=False)
                for f in fields(IndexMaps)
            )
        )
        if _whole(maps, plan):
            return maps
        reason = "their contents are not what they should be"
    except (OSError, ValueError, EOFError) as error:
        reason = str(error)
    log.warning("index maps in %s are built anew: %s", folder, reason)
    return None


def _whole(maps: IndexMaps, plan: Plan) -> bool:
    """Both maps are permutations: their sums give away a file that was filled with zeros or cut by a crash."""
    count = len(plan.documents) * plan.epochs
    if (
        maps.documents.shape != (count,)
        or maps.ends.shape != (count,)
        or maps.order.shape != (plan.samples,)
    ):
        return False
    documents = (plan.documents.start + plan.documents.stop - 1) * len(plan.documents) // 2
    sums = (
        int(maps.documents.sum(dtype=np.int64)),
        int(maps.order.sum(dtype=np.int64)),
        int(maps.ends[-1]),
    )
    whole = (
        plan.epochs * documents,
        plan.samples * (plan.samples - 1) // 2,
        plan.epochs * plan.tokens_per_epoch,
    )
    return sums == whole


def _save(folder: Path, maps: IndexMaps) -> None:
    """Write beside and rename the whole folder, so that ranks which build at the same time never see half of it."""
    beside = None
    try:
        folder.parent.mkdir(exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.", suffix=".tmp"))
        beside.chmod(folder.parent.stat().st_mode & 0o777)  # mkdtemp's folder is for its owner only
        for field in fields(IndexMaps):
            np.save(beside / f"{field.name}.npy", getattr(maps, field.name), allow_pickle=False)
        os.replace(beside, folder)  # fails where another rank was first
    except OSError as error:
        if not folder.is_dir():
            log.warning("index maps are not kept, every start builds them anew: %s", error)
        if beside:
            shutil.rmtree(beside, ignore_errors=True)
