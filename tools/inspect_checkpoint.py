"""List the checkpoints of a run, and test whether their files are unchanged.

python tools/inspect_checkpoint.py DIR

DIR is a run's folder or one checkpoint. Every file is compared with the size and the SHA-256 that
the checkpoint lists. Nothing is unpickled or run. The status is 1 when anything is damaged.
"""

import sys
from pathlib import Path

from megatron.checkpoints.manifest import OPTIMIZER, Damaged, faults_of, read_record
from megatron.checkpoints.saved import folder_of, latest_step, leftovers, step_of, steps_in
from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError, visible
from megatron.parallel.machine import in_bytes
from megatron.results.table import in_columns

HEADER = ("step", "size", "files", "config", "for", "state")


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder or a checkpoint")
    folder: Path = parser.parse_args(argv).folder
    checkpoints, last_lines = [folder], []
    if step_of(folder) is None:
        checkpoints = [folder_of(folder, step) for step in steps_in(folder)]
        last_lines.append(f"latest: step {latest_step(folder)}")
        last_lines += [f"left over by a process that died: {path}" for path in leftovers(folder)]
    if not checkpoints or not folder.is_dir():
        raise UserError(f"{folder}: holds no checkpoint - name a run's folder or one checkpoint")

    faults = []
    lines: list[tuple[str, ...]] = [HEADER]
    for path in checkpoints:
        wrong = faults_of(path)
        faults += wrong
        sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
        try:
            record = read_record(path)
            use = "resuming" if OPTIMIZER in record["files"] else "evaluation"
            facts = [record["config_hash"], use]
        except Damaged:
            facts = ["?", "?"]
        state = "damaged" if wrong else "verified"
        size = in_bytes(sum(sizes))
        lines.append((str(step_of(path)), size, str(len(sizes)), *facts, state))
    print(visible("\n".join([*in_columns(lines), *last_lines, *faults])))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
