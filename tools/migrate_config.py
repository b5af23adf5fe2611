"""Rewrite published files (KERPLE, MEP, GPT-NeoX) in today's spelling, and show what changes.

python tools/migrate_config.py train.yml exp_configs/ali_tanh_gau_all003_fp32_openwebtext2_1235.yml
python tools/migrate_config.py exp_configs/*.yml -o configs/mine

Where a file of MEP has a pos-emb that hides its mixture, explicit kernels are proposed from the
file's name. Without -o nothing is written, and no file is ever replaced.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.config.migrate import Migrated, migrated
from megatron.errors import UserError
from megatron.files import write_text


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    files = [migrated(name) for name in options.files]
    places = _places(files, options.output)
    for file in files:
        print(difference(file), end="")
    for file, place in places.items():
        write_text(place, file.text)
        print(f"written to {place}")
    return 0


def difference(file: Migrated) -> str:
    """The change of a file as a unified diff."""
    lines = difflib.unified_diff(
        file.before.splitlines(keepends=True),
        file.text.splitlines(keepends=True),
        str(file.path),
        f"{file.path} today",
    )
    ended = [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(ended)


def _places(files: Sequence[Migrated], folder: Path | None) -> dict[Migrated, Path]:
    """Where each file goes; nothing without a folder. UserError where something is there."""
    if folder is None:
        return {}
    places: dict[Migrated, Path] = {}
    for file in files:
        place = folder / file.path.name
        if place in places.values():
            raise UserError(
                f"-o: two of the files are called {place.name} - migrate them into two folders"
            )
        if place.exists():
            raise UserError(f"-o: {place} exists and is not replaced - name another folder")
        places[file] = place
    folder.mkdir(parents=True, exist_ok=True)
    return places


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML files, each by itself")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder for the new files; default: none"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
