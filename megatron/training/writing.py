"""A checkpoint while it is written: files are hashed and synced, faults are kept to the end."""

import shutil
from collections.abc import Callable, Iterator
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

        writer.save = save_and_hash
        try:
            yield
        except OSError as fault:  # of the scripts that DeepSpeed copies beside
            self.fault = self.fault or fault
        finally:
            del writer.save

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
        reason = None if self.fault is None else _reason(self.fault)
        ranks = grid.gather((entries, reason))
        reasons = [reason for _, reason in ranks if reason]
        if reasons:
            free = shutil.disk_usage(partial.parent).free
            if grid.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"save: {partial} cannot be written ({reasons[0]}; {free / 2**30:.2f} GiB were"
                f" free) - make room or save elsewhere; {kept}"
            )
        return {name: entry for entries, _ in ranks for name, entry in entries.items()}


def _reason(fault: Exception) -> str:
    return getattr(fault, "strerror", None) or str(fault).partition("\n")[0]
