"""List the checkpoints of a run, and test whether their files are unchanged.

python tools/inspect_checkpoint.py DIR

DIR is a run's folder or one checkpoint. Every file is compared with the size and the SHA-256 that
the checkpoint lists. Nothing is unpickled or run. The status is 1 when anything is damaged.
"""

import sys
from pathlib import Path

from megatron.checkpoints.manifest import (
    SETTINGS,
    Damaged,
    can_continue,
    faults_of,
    is_verifiable,
    read_record,
)
from megatron.checkpoints.saved import (
    OLDER,
    folder_of,
    leftovers,
    pointed,
    step_of,
    steps_in,
    without_record,
)
from megatron.cli_errors import command_parser, guarded
from megatron.config.yaml_files import read_file
from megatron.errors import UserError, visible
from megatron.parallel.machine import in_bytes
from megatron.results.table import in_columns

HEADER = ("step", "size", "files", "config", "engine", "ranks", "state")


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder or a checkpoint")
    folder: Path = parser.parse_args(argv).folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder - name a run's folder or one checkpoint")

    checkpoints, faults, last_lines = [folder], [], []
    if step_of(folder) is None:
        steps = sorted([*steps_in(folder), *without_record(folder)])
        if not steps:
            raise UserError(
                f"{folder}: holds no checkpoint - name a run's folder or one checkpoint"
            )
        checkpoints = [folder_of(folder, step) for step in steps]
        step, note = pointed(folder)
        last_lines.append(f"latest: step {step}" + (f" ({note})" if note else ""))
        last_lines += [f"left over by a process that died: {path}" for path in leftovers(folder)]
        if note and OLDER not in note:
            faults.append(f"{folder / 'latest'}: {note}")
    lines: list[tuple[str, ...]] = [HEADER]
    for path in checkpoints:
        wrong = faults_of(path)
        faults += wrong
        sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
        start = (str(step_of(path)), in_bytes(sum(sizes)), str(len(sizes)))
        try:
            record = read_record(path)
        except Damaged:
            lines.append((*start, "?", "?", "?", "damaged"))
            continue
        state = "verified"
        if wrong:
            state = "damaged"
        elif not is_verifiable(record):
            state = "not verifiable: written before checkpoints had sums"
        engine = "weights only"
        if can_continue(path, record):
            try:  # config.yml is only read as data
                settings = read_file(path / SETTINGS)
                engine = f"{settings['precision']} ZeRO {settings['zero_optimization']['stage']}"
            except (ValueError, LookupError, TypeError):
                engine = "?"
        ranks = str(record.get("ranks", "?"))
        lines.append((*start, record["config_hash"], engine, ranks, state))
    print(visible("\n".join([*in_columns(lines), *last_lines, *faults])))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
