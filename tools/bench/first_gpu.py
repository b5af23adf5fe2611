"""Test and time everything on a machine with a GPU, in three blocks of under ten minutes.

python tools/bench/first_gpu.py 1 2 3 --output gpu-check
python tools/bench/first_gpu.py 1 2 3 --output dry --dry

tools/bench/first_gpu.toml lists the steps. Every step writes its files as it goes, below
OUTPUT/blockN. The same command again runs what is missing: steps that failed, that were stopped,
that had not begun, and that were done with another commit or command. A dry run has the same
commands with small sizes on the CPU. docs/first_gpu.md says what each figure decides.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.cli_errors import command_parser, guarded
from megatron.commit import commit
from megatron.errors import UserError
from megatron.files import ROOT, write_text

PLAN = Path(__file__).with_suffix(".toml")
BLOCK = 510  # seconds; then its step is stopped
GRACE = 20  # seconds that a stopped step has to write what it has
Record = dict[str, Any]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("blocks", nargs="+", choices=("1", "2", "3"), metavar="BLOCK", help="1, 2 or 3")
    add("--output", type=Path, metavar="DIR", default=Path("gpu-check"), help="of the results")
    add("--dry", action="store_true", help="small sizes on the CPU")
    data = ["configs/data/openwebtext2.yml"]
    corpus = "the corpus of block 3; default: %(default)s"
    add("--data", nargs="+", default=data, metavar="FILE|key=value", help=corpus)
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise UserError("torch finds no CUDA device; --dry (DRY=1) runs small sizes on the CPU")
    os.environ |= {"TEST_GPU": "1", "PYTHONUNBUFFERED": "1"}

    # Leave as an exception does, so that the step that runs is ended too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    statuses = set()
    for block in options.blocks:
        folder = (options.output / f"block{block}").resolve()
        records = run_steps(steps(block, folder, options.data, dry=options.dry), folder)
        statuses |= {record["status"] for record in records.values()}
    return int(statuses != {"done"})


def steps(block: str, folder: Path, data: Sequence[str], *, dry: bool) -> list[Record]:
    """The steps of a block, with `command` as words.

    folder: of its results; data: YAML files and settings that name a corpus
    """
    plan = tomllib.loads(PLAN.read_text(encoding="utf-8"))
    if dry:
        data = [f"data_path={folder}/data/docs/docs_text_document"]
    values = {**plan["words"], "folder": shlex.quote(str(folder)), "data": shlex.join(data)}
    chosen = []
    for step in plan[f"block{block}"]:
        line = f"{step['run']} {step.get('dry', '')}" if dry else step["run"]
        command = [sys.executable, *shlex.split(line.format_map(values))]
        if dry or not step.get("only_dry"):
            chosen.append({"needs": [], **step, "command": command})
    return chosen


def run_steps(
    steps: Sequence[Record], folder: Path, *, seconds: float = BLOCK
) -> dict[str, Record]:
    """Run what is missing of these steps; their records by name.

    seconds: of all together; then a step is stopped, and no other begins
    """
    end = time.monotonic() + seconds
    file = folder / "summary.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    records: dict[str, Record] = {}
    for step in steps:
        name = step["name"]
        begin = time.monotonic()
        record = {"status": "done", "command": step["command"], "commit": commit()}
        if record.items() <= earlier.get(name, {}).items():
            record = earlier[name]
        elif begin > end or any(records[need]["status"] != "done" for need in step["needs"]):
            record["status"] = "not begun"
        else:
            folder.mkdir(parents=True, exist_ok=True)
            until = min(begin + step["seconds"], end)
            record["status"] = run_command(step["command"], folder / f"{name}.log", until)
            record["seconds"] = round(time.monotonic() - begin, 1)
        records[name] = record
        print(f"{folder.name}: {name}: {record['status']}", flush=True)
        write_text(file, json.dumps(records, indent=1) + "\n")
    return records


def run_command(command: list[str], log: Path, until: float) -> str:
    """Run a command until it ends or the time is over; how it ended.

    What it started ends with it; a training that is stopped writes its checkpoint first.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return "failed" if process.wait(max(0.0, until - time.monotonic())) else "done"
        except subprocess.TimeoutExpired:
            return "stopped"
        finally:
            for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(seconds)


if __name__ == "__main__":
    sys.exit(main())
