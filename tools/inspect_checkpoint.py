"""The checkpoints of a run, and whether they are as they were written.

python tools/inspect_checkpoint.py DIR [--quick]

DIR is a run's folder or one checkpoint. Every file is compared with the size and the SHA-256 that
the checkpoint lists. Nothing is unpickled or run. The status is 1 when anything is damaged.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoints.manifest import (
    SETTINGS,
    Damaged,
    engine_files,
    faults_of,
    is_verifiable,
    read_record,
    wrong_sizes,
)
from megatron.checkpoints.saved import (
    MISSING,
    folder_of,
    leftovers,
    lost_its_record,
    pointed,
    step_of,
    steps_in,
    without_record,
)
from megatron.cli_errors import guarded
from megatron.config.yaml_files import read_file
from megatron.errors import UserError, visible
from megatron.results.table import in_columns

HEADER = ("step", "size", "files", "config", "engine", "ranks", "state")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Line:
    """A row of the table; source: where the model came from; faults: what is wrong with it."""

    cells: tuple[str, ...]
    faults: tuple[str, ...] = ()
    source: str | None = None


@guarded
def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    folder: Path = options.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is no folder - name a run's folder or one checkpoint")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder - name a run's folder or one checkpoint")
    if step_of(folder) is None:
        return _show_run(folder, quick=options.quick)
    line = line_of(folder, quick=options.quick)
    print(visible(table([line.cells])))
    _print_sources([line])
    return _end(line.faults)


def _show_run(run: Path, *, quick: bool) -> int:
    """All checkpoints, what `latest` names and what is left over; the exit status."""
    steps = sorted([*steps_in(run), *without_record(run)])
    unfinished = leftovers(run)
    if not steps and not unfinished:
        raise UserError(f"{run}: holds no checkpoint - name a run's folder or one checkpoint")
    lines = [line_of(folder_of(run, step), quick=quick) for step in steps]
    faults = [fault for line in lines for fault in line.faults]
    if lines:
        print(visible(table([line.cells for line in lines])))
    _print_sources(lines)
    step, note = pointed(run)
    if steps:
        print(f"latest: step {step}" + (f" ({run / 'latest'} {note})" if note else ""))
    for path in unfinished:
        print(f"left over by a process that died: {path}")
    pointer = run / "latest"
    if note and not note.startswith(("is older", MISSING)):
        faults.append(f"{pointer}: {note}")
    return _end(faults)


def _print_sources(lines: Sequence[Line]) -> None:
    """Parent and origin of the checkpoints, once each."""
    for source in dict.fromkeys(line.source for line in lines if line.source):
        print(visible(source))


def _end(faults: Sequence[str]) -> int:
    for line in faults:
        print(visible(line))
    return 1 if faults else 0


def line_of(path: Path, *, quick: bool) -> Line:
    """What is known of one checkpoint, and what is wrong with it.

    quick: compare sizes alone
    """
    files = [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    start = (str(step_of(path)), readable(size), str(len(files)))
    if lost_its_record(path):
        return Line((*start, "?", "?", "?", "damaged"), (f"{path}/checkpoint.json: is missing",))
    try:
        record = read_record(path)
    except Damaged as damage:
        return Line((*start, "?", "?", "?", "damaged"), tuple(damage.faults))
    faults = wrong_sizes(path, record) if quick else faults_of(path)
    facts = (record["config_hash"], engine_of(path, record), str(record.get("ranks", "?")))
    cells = (*start, *facts, _state(record, faults, quick=quick))
    return Line(cells, tuple(faults), source_of(record))


def source_of(record: dict[str, Any]) -> str | None:
    """Where a model came from, in words: its parent, or what it was imported from."""
    parent, origin = record.get("parent"), record.get("origin")
    if parent:
        described = record.get("parent_model") or f"step {parent['step']}"
        weights = f"config {parent['config_hash']}, weights {parent['weights']}"
        return f"fine-tuned from {parent['path']} ({described}, {weights})"
    if isinstance(origin, dict):
        kind = origin.get("architecture") or origin.get("kind")
        return f"imported from {origin.get('source')} ({kind})"
    return None


def _state(record: dict[str, Any], faults: Sequence[str], *, quick: bool) -> str:
    if faults:
        return "damaged"
    if not is_verifiable(record):
        return "not verifiable: written before checkpoints had sums"
    return "sizes as written" if quick else "verified"


def engine_of(path: Path, record: dict[str, Any]) -> str:
    """Precision and ZeRO stage by config.yml, which is only read as data."""
    if not engine_files(path, record):
        return "weights only"
    try:
        settings = read_file(path / SETTINGS)
        stage = settings["zero_optimization"]["stage"]
        return f"{settings['precision']} ZeRO {stage}"
    except (ValueError, LookupError, TypeError):
        return "?"


def readable(size: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    number, unit = float(size), 0
    while number >= 1024 and unit + 1 < len(UNITS):
        number /= 1024
        unit += 1
    return f"{number:.0f} {UNITS[unit]}" if unit == 0 else f"{number:.1f} {UNITS[unit]}"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows under their header, in columns."""
    return "\n".join(in_columns([HEADER, *rows]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder or a checkpoint")
    parser.add_argument("--quick", action="store_true", help="compare sizes alone, read no file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
