"""Test and time everything on a machine with a GPU: blocks of seven, five and ten minutes.

python tools/bench/first_gpu.py 1 2 --output gpu-check
python tools/bench/first_gpu.py 1 2 3 --output dry --dry

tools/bench/first_gpu.toml lists the steps. Every step writes its files as it goes, below
OUTPUT/blockN; a block that is stopped leaves what it has. A dry run has the same commands with
small sizes on the CPU. docs/first_gpu.md says what each figure decides.
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
from megatron.errors import UserError
from megatron.files import ROOT, write_text

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SLOWER = 5  # what a dry run takes at most, where a compiler is at work on few cores
GRACE = 20  # seconds that a stopped step has to write what it has
Record = dict[str, Any]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("blocks", nargs="+", choices=PLAN["seconds"], metavar="BLOCK", help="1, 2 or 3")
    add("--output", type=Path, metavar="DIR", default=Path("gpu-check"), help="of the results")
    add("--dry", action="store_true", help="small sizes on the CPU")
    data = ["configs/data/openwebtext2.yml"]
    corpus = "the corpus of block 2; default: %(default)s"
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
        chosen = steps(block, folder, options.data, dry=options.dry)
        records = run_steps(chosen, folder, PLAN["seconds"][block] * (SLOWER if options.dry else 1))
        statuses |= {record["status"] for record in records}
    return int(statuses != {"done"})


def steps(block: str, folder: Path, data: Sequence[str], *, dry: bool) -> list[Record]:
    """The steps of a block, with `command` as words.

    folder: of its results; data: YAML files and settings that name a corpus
    """
    if dry:
        data = [f"data_path={folder}/data/docs/docs_text_document"]
    values = {**PLAN["words"], "folder": shlex.quote(str(folder)), "data": shlex.join(data)}
    chosen = []
    for step in PLAN[f"block{block}"]:
        line = f"{step['run']} {step.get('dry', '')}" if dry else step["run"]
        command = [sys.executable, *shlex.split(line.format_map(values))]
        if dry or not step.get("only_dry"):
            seconds = step["seconds"] * (SLOWER if dry else 1)
            chosen.append({**step, "command": command, "seconds": seconds})
    return chosen


def run_steps(steps: Sequence[Record], folder: Path, seconds: float) -> list[Record]:
    """Run steps one after the other, in so many seconds together; a record of each."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    records = []
    for step in steps:
        begin = time.monotonic()
        limit = min(step["seconds"], end - begin)
        log = folder / f"{step['name']}.log"
        status = run_command(step["command"], log, limit) if limit > 0 else "not begun"
        took = round(time.monotonic() - begin, 1)
        records.append({"name": step["name"], "status": status, "seconds": took})
        print(f"{folder.name}: {step['name']}: {status} ({took} s)", flush=True)
        write_text(folder / "summary.json", json.dumps(records, indent=1) + "\n")
    return records


def run_command(command: list[str], log: Path, seconds: float) -> str:
    """Run a command until it ends or the time is over; how it ended.

    What it started ends with it; a training that is stopped writes its checkpoint first.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            return "stopped"
        finally:
            for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(patience)


if __name__ == "__main__":
    sys.exit(main())
