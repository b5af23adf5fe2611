"""A checkpoint while it is written: files are hashed and synced, faults are kept to the end."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megatron.errors import UserError
from megatron.files import sync
from megatron.parallel.grid import Grid
from megatron.training.manifest import THREADS, Entries, entry_of

FAULTS = (OSError, RuntimeError, SafetensorError)  # of torch.save and save_file on a full disk


class Writing:
    """What one rank writes of a checkpoint.

    A rank that raised at once would leave the others waiting inside the engine. So a fault is kept
    until all ranks have written.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self._pool = ThreadPoolExecutor(THREADS)
        self._entries: dict[str, Future[dict[str, Any]]] = {}
        self._syncs: list[Future[None]] = []

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Call write(path), then hash and sync the file in threads; nothing after a fault."""
        if self.fault is not None:
            return
        try:
            write(path)
        except FAULTS as fault:
            self.fault = fault
            return
        self._syncs.append(self._pool.submit(sync, path))
        self._entries[path.name] = self._pool.submit(entry_of, path)

    @contextmanager
    def files_of(self, engine: Any) -> Iterator[None]:
        """Every file that the DeepSpeed engine writes inside the block is one of these."""
        writer = engine.checkpoint_engine
        save = writer.save

        def save_and_hash(state_dict: Any, path: str) -> None:
            self.write(Path(path), lambda file: save(state_dict, str(file)))

        copy_scripts = engine._copy_recovery_script

        def copy_or_keep_the_fault(folder: str) -> None:
            try:
                copy_scripts(folder)
            except OSError as fault:  # the first rank must not miss the barrier that follows
                self.fault = self.fault or fault

        writer.save = save_and_hash
        engine._copy_recovery_script = copy_or_keep_the_fault
        try:
            yield
        except OSError as fault:  # of the folder
            self.fault = self.fault or fault
        finally:
            del writer.save, engine._copy_recovery_script

    def finished(self, grid: Grid, partial: Path, kept: str) -> Entries:
        """The files of all ranks, on the disk. Every rank calls this.

        UserError on every rank where one could not write; then the folder `partial` is removed.
        kept: what stays, for the message
        """
        entries: Entries = {}
        with self._pool:
            try:
                for done in self._syncs:
                    done.result()
                entries = {name: entry.result() for name, entry in self._entries.items()}
            except OSError as fault:
                self.fault = self.fault or fault
        ranks = grid.gather((entries, _reason(self.fault)))
        _check([reason for _, reason in ranks], grid, partial, kept)
        return {name: entry for entries, _ in ranks for name, entry in entries.items()}


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
    if grid.first:
        shutil.rmtree(partial, ignore_errors=True)
    raise UserError(
        f"save: {partial} cannot be written ({reason}; {free / 2**30:.2f} GiB were"
        f" free) - make room or save elsewhere; {kept}"
    )


def _reason(fault: Exception | None) -> str | None:
    if fault is None:
        return None
    return getattr(fault, "strerror", None) or str(fault).partition("\n")[0]
