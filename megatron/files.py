"""Files that appear whole or not at all."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the project's folder: entry scripts, configs, tools


class Beside:
    """A temporary file in the same folder that takes `path`'s place when the `with` block ends well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            os.replace(self.temporary, self.path)
        self.temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write the whole file in UTF-8: readers see the old text or the new one, never a part."""
    with Beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
