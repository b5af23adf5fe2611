"""The checkpoints of a run, and whether they are as they were written.

python tools/inspect_checkpoint.py DIR [--quick]

DIR is a run's folder or one checkpoint. Every file is compared with the size and the SHA-256 that
the checkpoint lists. Nothing is unpickled or run. The status is 1 when anything is damaged.
"""

import argparse
import sys
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
from megatron.parallel.machine import in_bytes
from megatron.results.table import in_columns

HEADER = ("step", "size", "files", "config", "engine", "ranks", "state")


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder or a checkpoint")
    parser.add_argument("--quick", action="store_true", help="compare sizes alone, read no file")
    options = parser.parse_args(argv)
    folder: Path = options.folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder - name a run's folder or one checkpoint")

    is_run = step_of(folder) is None
    checkpoints, unfinished = [folder], []
    if is_run:
        steps = sorted([*steps_in(folder), *without_record(folder)])
        checkpoints = [folder_of(folder, step) for step in steps]
        unfinished = leftovers(folder)
        if not checkpoints and not unfinished:
            what = "holds no checkpoint - name a run's folder or one checkpoint"
            raise UserError(f"{folder}: {what}")
    lines: list[tuple[str, ...]] = [HEADER]
    faults: list[str] = []
    sources: dict[str, bool] = {}
    for path in checkpoints:
        cells, wrong, source = line_of(path, quick=options.quick)
        lines.append(cells)
        faults += wrong
        if source:
            sources[source] = True  # once each
    shown = []
    if checkpoints:
        shown += [*in_columns(lines), *sources]
    if is_run:
        step, note = pointed(folder)
        pointer = folder / "latest"
        if checkpoints:
            shown.append(f"latest: step {step}" + (f" ({pointer} {note})" if note else ""))
        shown += [f"left over by a process that died: {path}" for path in unfinished]
        if note and not note.startswith(("is older", MISSING)):
            faults.append(f"{pointer}: {note}")
    print(visible("\n".join([*shown, *faults])))
    return int(bool(faults))


def line_of(path: Path, *, quick: bool) -> tuple[tuple[str, ...], list[str], str | None]:
    """One checkpoint: its cells of the table, what is wrong with it, and where it came from.

    quick: compare sizes alone
    """
    files = [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    start = (str(step_of(path)), in_bytes(size), str(len(files)))
    unreadable = (*start, "?", "?", "?", "damaged")
    if lost_its_record(path):
        return unreadable, [f"{path}/checkpoint.json: is missing"], None
    try:
        record = read_record(path)
    except Damaged as damage:
        return unreadable, [*damage.faults], None
    faults = [*(wrong_sizes(path, record) if quick else faults_of(path))]
    state = "sizes as written" if quick else "verified"
    if faults:
        state = "damaged"
    elif not is_verifiable(record):
        state = "not verifiable: written before checkpoints had sums"
    facts = (record["config_hash"], engine_of(path, record), str(record.get("ranks", "?")), state)
    return (*start, *facts), faults, source_of(record)


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


if __name__ == "__main__":
    sys.exit(main())
