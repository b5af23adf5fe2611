"""A checkpoint while it is written: hashed and checked meanwhile, faults kept to the end."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from safetensors import SafetensorError
from torch.serialization import get_crc32_options, set_crc32_options

from megatron.checkpoints.manifest import THREADS, Entries, entry_of
from megatron.errors import UserError
from megatron.files import sync
from megatron.parallel.grid import Grid
from megatron.training.finite import not_finite, saved_numbers

FAULTS = (OSError, RuntimeError, SafetensorError)  # of torch.save and save_file on a full disk
CURE = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
SHOWN = 3  # names in a message
WORTH_A_THREAD = 2**18  # bytes; to hash fewer takes less time than to hand them over


class Writing:
    """What one rank writes of a checkpoint, and whether its numbers are finite.

    Threads hash, sync and check while the next file is written. A rank that raised at once would
    leave the others waiting inside the engine. So a fault is kept until all ranks have written.
    """

    def __init__(self, engine: Any) -> None:
        self.fault: BaseException | None = None
        self._engine = engine
        self._pool = ThreadPoolExecutor(THREADS)
        self._hasher = ThreadPoolExecutor(1)  # never behind a slow disk
        self._entries: dict[str, Future[dict[str, Any]]] = {}
        self._syncs: list[Future[None]] = []
        # Listed now: while ZeRO 3 gathers weights, they are not those that it saves.
        self._bad = self._pool.submit(not_finite, saved_numbers(engine))

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Call write(path), then hash and sync the file in threads; nothing after a fault."""
        if self.fault is not None:
            return
        try:
            write(path)
        except FAULTS as fault:
            self.fault = fault
            return
        self._entries[path.name] = self._pool.submit(entry_of, path)
        self._syncs.append(self._pool.submit(sync, path))

    def files_of_engine(self, run: Path, name: str) -> None:
        """Let the DeepSpeed engine write its files to a folder of the run; every rank calls this.

        Its files are hashed as they are written.
        """
        with self._instead_of_its_writer():
            try:
                self._engine.save_checkpoint(str(run), tag=name, save_latest=False)
            except OSError as fault:  # of the folder
                self.fault = self.fault or fault

    @contextmanager
    def _instead_of_its_writer(self) -> Iterator[None]:
        writer = self._engine.checkpoint_engine
        copy_scripts = self._engine._copy_recovery_script

        def copy_or_keep_the_fault(folder: str) -> None:
            try:
                copy_scripts(folder)
            except OSError as fault:  # the first rank must not miss the barrier that follows
                self.fault = self.fault or fault

        writer.save = self._save
        self._engine._copy_recovery_script = copy_or_keep_the_fault
        try:
            yield
        finally:  # their classes have these too
            del writer.save, self._engine._copy_recovery_script

    def _save(self, state_dict: Any, path: str) -> None:
        """As DeepSpeed's own writer, torch.save, but hashed."""
        if self.fault is not None:
            return
        file = Path(path)
        try:
            with file.open("wb") as opened:
                hashed = _Hashed(opened, self._hasher)
                _torch_save(state_dict, hashed)
        except FAULTS as fault:
            self.fault = fault
            return
        self._entries[file.name] = self._pool.submit(hashed.entry)
        self._syncs.append(self._pool.submit(sync, file))

    def finished(self, grid: Grid, partial: Path, kept: str) -> Entries:
        """The files of all ranks, on the disk. Every rank calls this.

        UserError on every rank where one could not write, or where a number is not finite; then
        the folder `partial` is removed.
        kept: what stays, for the message
        """
        entries: Entries = {}
        with self._pool, self._hasher:
            bad = self._bad.result()
            try:
                for done in self._syncs:
                    done.result()
                entries = {name: entry.result() for name, entry in self._entries.items()}
            except OSError as fault:
                self.fault = self.fault or fault
        ranks = grid.gather((entries, _reason(self.fault), bad))
        _check([reason for _, reason, _ in ranks], grid, partial, kept)
        for _, _, names in ranks:
            if names:
                _remove(grid, partial)
                raise _not_finite(partial, names, kept)
        return {name: entry for entries, _, _ in ranks for name, entry in entries.items()}


def _torch_save(state_dict: Any, file: "_Hashed") -> None:
    """torch.save; a fault of the disk is raised as it was, not as what torch makes of it."""
    try:
        with _without_crc32():
            torch.save(state_dict, cast(IO[bytes], file))
    except RuntimeError as fault:  # `unexpected pos`, where pieces were dropped
        raise file.fault or fault from None
    if file.fault is not None:
        raise file.fault


class _Hashed:
    """What torch.save writes to, in order: a thread hashes each piece while it is written.

    `write` never raises: torch calls it from C++. The fault is kept, and the rest is dropped.
    """

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self.fault: BaseException | None = None
        self._file, self._pool = file, pool
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, piece: Any) -> int:
        view = memoryview(piece)
        if self.fault is None:
            try:
                self._write(view)
            except BaseException as fault:
                self.fault = fault
        return view.nbytes

    def _write(self, view: memoryview) -> None:
        self._size += view.nbytes
        if view.nbytes < WORTH_A_THREAD:
            self._digest.update(view)
            self._file.write(view)
            return
        hashed = self._pool.submit(self._digest.update, view)
        try:
            self._file.write(view)
        finally:
            hashed.result()  # the memory is torch's again when this returns

    def flush(self) -> None:
        """Nothing: closing the file does it."""

    def entry(self) -> dict[str, Any]:
        """What a record says of the file."""
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch.save leave out its own sums, which cost as much as ours; torch.load needs none."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _not_finite(partial: Path, names: list[str], kept: str) -> UserError:
    shown = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        shown += f" and {len(names) - SHOWN} more"
    step = partial.name.removeprefix("partial_step")
    return UserError(
        f"save: not finite after step {step}: {shown} - nothing was saved, {kept}; {CURE}"
    )


@contextmanager
def writable(grid: Grid, partial: Path, kept: str) -> Iterator[None]:
    """Let all ranks wait for each other; UserError on every rank where a disk refused one's part.

    Arguments are those of `Writing.finished`.
    """
    found = None
    try:
        yield
    except OSError as fault:
        found = fault
    _check(grid.gather(_reason(found)), grid, partial, kept)


def _check(reasons: Sequence[str | None], grid: Grid, partial: Path, kept: str) -> None:
    """UserError with the first reason of any rank; then the folder `partial` is removed."""
    reason = next(filter(None, reasons), None)
    if reason is None:
        return
    free = shutil.disk_usage(partial.parent).free
    _remove(grid, partial)
    raise UserError(
        f"save: {partial} cannot be written ({reason}; {free / 2**30:.2f} GiB were"
        f" free) - make room or save elsewhere; {kept}"
    )


def _remove(grid: Grid, partial: Path) -> None:
    if grid.first:
        shutil.rmtree(partial, ignore_errors=True)


def _reason(fault: BaseException | None) -> str | None:
    if fault is None:
        return None
    return getattr(fault, "strerror", None) or str(fault).partition("\n")[0]
