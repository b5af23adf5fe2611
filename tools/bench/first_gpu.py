"""Test and time everything on a machine with a GPU, in three blocks of under ten minutes.

python tools/bench/first_gpu.py 1 2 3 --output gpu-check
python tools/bench/first_gpu.py 1 2 3 --output dry --dry

tools/bench/first_gpu.toml lists the steps. Every step writes its files as it goes, below
OUTPUT/blockN. The same command again runs what is missing: steps that failed, that were stopped,
that had not begun, and that were done with another commit, device or command. A dry run has the
same commands with small sizes on the CPU. docs/first_gpu.md says what each figure decides.
"""

import contextlib
import importlib.util
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
from measure import report_progress, table

from megatron.cli_errors import command_parser, guarded
from megatron.commit import commit
from megatron.files import ROOT, write_text

PLAN = Path(__file__).with_suffix(".toml")
BLOCK = 510  # seconds; then its step is stopped
GRACE = 20  # seconds that a stopped step has to write what it has
Record = dict[str, Any]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("blocks", nargs="+", type=int, choices=(1, 2, 3), metavar="BLOCK", help="1, 2 or 3")
    add("--output", type=Path, metavar="DIR", default=Path("gpu-check"), help="of the results")
    add("--dry", action="store_true", help="small sizes on the CPU")
    data = ["configs/data/openwebtext2.yml"]
    corpus = "the corpus of block 3; default: %(default)s"
    add("--data", nargs="+", default=data, metavar="FILE|key=value", help=corpus)
    options = parser.parse_args(argv)

    # Leave as an exception does, so that the step that runs is ended too.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ends_well = True
    try:
        for block in options.blocks:
            folder = (options.output / f"block{block}").resolve()
            folder.mkdir(parents=True, exist_ok=True)
            data = options.data
            if options.dry and block == 3:
                # This project's documents.
                prefix = folder / "data/docs/docs_text_document"
                if not prefix.with_suffix(".idx").exists():
                    texts = [str(path) for path in sorted(ROOT.glob("docs/*.md"))]
                    words = ["--input", *texts, "--name", "docs", "-t", "CharLevelTokenizer"]
                    words += ["-d", str(folder / "data")]
                    command = [sys.executable, "prepare_data.py", *words]
                    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
                data = [f"data_path={prefix}"]
            records = run_steps(steps(block, folder, data), folder, dry=options.dry)
            print(f"block {block}\n\n{summary(records)}")
            ends_well &= all(one["status"] in ("done", "skipped") for one in records.values())
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(not ends_well)


def steps(block: int, folder: Path, data: Sequence[str]) -> list[Record]:
    """The steps of a block, with `run` and `dry` as words of a command line.

    folder: of its results; data: YAML files and settings that name a corpus
    """
    plan = tomllib.loads(PLAN.read_text(encoding="utf-8"))
    values = {**plan["words"], "folder": shlex.quote(str(folder)), "data": shlex.join(data)}
    found = []
    for step in plan[f"block{block}"]:
        commands = {
            name: shlex.split(step.get(name, "").format_map(values)) for name in ("run", "dry")
        }
        found.append({"packages": [], "needs": [], **step, **commands})
    return found


def run_steps(
    wanted: Sequence[Record], folder: Path, *, dry: bool, seconds: float = BLOCK
) -> dict[str, Record]:
    """Run what is missing of these steps; their records by name.

    seconds: of all together; then a step is stopped, and no other begins
    """
    end = time.monotonic() + seconds
    on_gpu = torch.cuda.is_available() and not dry
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    file = folder / "summary.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    records: dict[str, Record] = {}
    for step in wanted:
        name, is_test = step["name"], "pytest" in step["run"]
        command = [sys.executable, *step["run"], *(step["dry"] if dry else ())]
        if is_test and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(8, max(1, (os.cpu_count() or 1) // 2)))]
        conditions = {"command": command, "device": device, "commit": commit()}
        record = earlier.get(name, {})
        lacking = [one for one in step["packages"] if importlib.util.find_spec(one) is None]
        undone = [one for one in step["needs"] if records[one]["status"] != "done"]
        if record.get("status") == "done" and conditions.items() <= record.items():
            pass
        elif lacking:
            record = {"status": "skipped", "reason": f"not installed: {', '.join(lacking)}"}
        elif not (is_test or dry or on_gpu):  # tests say themselves what they need
            record = {"status": "skipped", "reason": "needs a CUDA device"}
        elif undone:
            record = {"status": "not begun", "reason": f"{undone[0]} is not done"}
        elif time.monotonic() > end:
            record = {"status": "not begun", "reason": "the block's time is over"}
        else:
            report_progress(f"{folder.name}: {name}")
            begin = time.monotonic()
            until = min(begin + step["seconds"], end)
            status = run_command(command, folder / f"{name}.log", until, dry=dry)
            taken = round(time.monotonic() - begin, 1)
            record = {"status": status, "seconds": taken, "torch": torch.__version__, **conditions}
        records[name] = record
        write_text(file, json.dumps(records, indent=1) + "\n")
        write_text(folder / "summary.md", summary(records))
    return records


def run_command(command: list[str], log: Path, until: float, *, dry: bool) -> str:
    """Run a command until it ends or the time is over; how it ended.

    What it started ends with it; a training that is stopped writes its checkpoint first.
    """
    variables = os.environ | {"PYTHONUNBUFFERED": "1"}
    if "pytest" in command:
        variables["TEST_GPU"] = "1"
    if dry:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True
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


def summary(records: dict[str, Record]) -> str:
    """A table of the steps of a block in Markdown."""
    lines = []
    for name, record in records.items():
        seconds = str(record.get("seconds", "-"))
        lines.append([name, record["status"], seconds, record.get("reason", "")])
    return table(["step", "status", "seconds", "reason"], lines)


if __name__ == "__main__":
    sys.exit(main())
