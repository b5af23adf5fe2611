"""Files that appear whole or not at all: written beside their place, synced to disk, renamed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the project's folder: entry scripts, configs, tools


class Beside:
    """A temporary file in the same folder; it replaces `path` when the `with` block ends well.

    with Beside(path) as temporary:
        numpy.save(temporary, array)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = _temporary(path)

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                sync(self.temporary)
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


class Together:
    """Temporary files, one for each path, that take their places when the `with` block ends well.

    The last path says that the set is whole: it is removed first and comes back at the end, so a
    reader that needs it never meets old and new files mixed. A path for which the block wrote
    nothing is removed.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.temporaries = [_temporary(path) for path in paths]

    def __enter__(self) -> list[Path]:
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        return self.temporaries

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._replace()
        finally:
            for temporary in self.temporaries:
                temporary.unlink(missing_ok=True)

    def _replace(self) -> None:
        for temporary in self.temporaries:
            if temporary.exists():
                sync(temporary)
        self.paths[-1].unlink(missing_ok=True)
        for temporary, path in zip(self.temporaries, self.paths, strict=True):
            if temporary.exists():
                os.replace(temporary, path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` when the block ends well.

    Raises OSError where another process has put a folder there meanwhile; that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        temporary.chmod(path.parent.stat().st_mode & 0o777)  # mkdtemp's is for its owner only
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write the whole file in UTF-8: readers see the old text or the new one, never a part."""
    with Beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def sync(path: Path) -> None:
    """Wait until a file is on the disk: a rename must not overtake the contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
