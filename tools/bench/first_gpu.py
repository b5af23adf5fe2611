"""Test and time everything on a machine with a GPU, in three blocks of under ten minutes.

python tools/bench/first_gpu.py 1 2 3 --output gpu-check
python tools/bench/first_gpu.py 1 2 3 --output dry --dry

Every step writes its files as it goes, below OUTPUT/blockN. The same command again runs what is
missing: steps that failed, that were stopped, that had not begun, and that were done with another
commit, device or command. A dry run has the same commands with small sizes, on a machine without a
GPU. docs/first_gpu.md says what each figure decides.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_tables import table
from gpu_steps import SMALL_STEPS, Places, Step, steps
from measure import positive, report_progress

from megatron.cli_errors import guarded
from megatron.commit import commit
from megatron.errors import UserError, did_you_mean
from megatron.files import write_text

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 20  # that a stopped step has to write what it has
CORES_OF_A_PART = 2
NO_TESTS = 5  # exit status of pytest where there is none to run
RECORDS = "steps.json"
FINISHED = "done"
Record = dict[str, Any]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("blocks", nargs="+", type=int, choices=(1, 2, 3), metavar="BLOCK", help="1, 2 or 3")
    add("--output", type=Path, metavar="DIR", help="default: gpu-check, with --dry: dry")
    add("--minutes", type=float, default=8.5, help="of a block; then its step is stopped")
    add("--steps", nargs="+", metavar="NAME", help="only these, even if they are done")
    add("--dry", action="store_true", help="small sizes on the CPU")
    add(
        "--data",
        nargs="+",
        default=["configs/data/openwebtext2.yml"],
        metavar="FILE|key=value",
        help="the corpus of block 3; default: %(default)s",
    )
    add("--train_iters", type=positive, default=2000, metavar="N", help="of each run of block 3")
    add(
        "--archive",
        type=Path,
        metavar="FILE.tar.gz",
        help="pack all files into it after each step, without weights",
    )
    options = parser.parse_args(argv)
    if options.output is None:
        options.output = Path("dry" if options.dry else "gpu-check")
    check(options)
    before = signal.signal(signal.SIGTERM, end_by_signal)
    try:
        records = [record for block in options.blocks for record in run_block(block, options)]
    finally:
        signal.signal(signal.SIGTERM, before)
    bad = [one for one in records if one["status"] not in (FINISHED, "skipped")]
    return 1 if bad else 0


def check(options: argparse.Namespace) -> None:
    """UserError for a step that no block has, and for an archive without a folder."""
    nowhere = Places(options.output, options.data, options.train_iters)
    known = [step.name for block in options.blocks for step in steps(block, nowhere)]
    for name in options.steps or []:
        if name not in known:
            hint = did_you_mean(name, known) or f"use {', '.join(known)}"
            blocks = " and ".join(map(str, options.blocks))
            raise UserError(f"--steps: block {blocks} has no step {name!r}; {hint}")
    archive = options.archive
    if archive and not archive.resolve().parent.is_dir():
        raise UserError(f"--archive: {archive.parent} is no folder; make it first")


def end_by_signal(number: int, _: Any) -> None:
    """Leave as an exception does, so that the step that runs is ended too."""
    sys.exit(128 + number)


def run_block(block: int, options: argparse.Namespace) -> list[Record]:
    """Run what is missing of a block; one record for each of its steps, in order."""
    folder = options.output.resolve() / f"block{block}"
    folder.mkdir(parents=True, exist_ok=True)
    data = options.data
    if options.dry and block == 3:
        data = small_corpus(folder)
    places = Places(folder, data, SMALL_STEPS if options.dry else options.train_iters)
    records = run_steps(steps(block, places), folder, options)
    print(f"block {block}\n\n{summary(records)}")
    return list(records.values())


def run_steps(
    wanted: Sequence[Step], folder: Path, options: argparse.Namespace
) -> dict[str, Record]:
    """Run what is missing of these steps; their records by name."""
    end = time.monotonic() + 60 * options.minutes
    now = conditions(dry=options.dry)
    earlier = read_records(folder)
    records = {}
    for step in wanted:
        if step.name in earlier:
            records[step.name] = earlier[step.name]
    for step in wanted:
        if not chosen(step, records, now, options.steps):
            continue
        record = waiting(step, wanted, records, now)
        if record is None and time.monotonic() > end:
            record = {"status": "not begun", "reason": "the block's time is over"}
        if record is None:
            report_progress(f"{folder.name}: {step.name}")
            record = run_step(step, folder, end, now)
            forget_what_needs(step.name, wanted, records)
        records[step.name] = record
        write_text(folder / RECORDS, json.dumps(records, indent=1) + "\n")
        write_text(folder / "summary.md", summary(records))
        if options.archive:
            pack(folder.parent, options.archive.resolve())
    return records


def conditions(*, dry: bool) -> Record:
    """What a step that is done was done with; with anything else it is to be run again."""
    on_gpu = torch.cuda.is_available() and not dry
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    return {"dry": dry, "device": device, "commit": commit()}


def command_of(step: Step, *, dry: bool) -> list[str]:
    words = [*step.words, *step.small] if dry else step.words
    return [*step.program, sys.executable, *words]


def chosen(
    step: Step, records: dict[str, Record], now: Record, names: Sequence[str] | None
) -> bool:
    """Whether a step has one of these names; without names, whether it is not done."""
    if names is not None:
        return step.name in names
    return not is_done(step, records, now)


def is_done(step: Step, records: dict[str, Record], now: Record) -> bool:
    """Whether it ended well, by the same command and in the same conditions as now."""
    record = records.get(step.name, {})
    same = {**now, "command": command_of(step, dry=now["dry"])}
    return record.get("status") == FINISHED and record == {**record, **same}


def waiting(
    step: Step, wanted: Sequence[Step], records: dict[str, Record], now: Record
) -> Record | None:
    """The record of a step that cannot begin because another one is not done; else None."""
    for need in wanted:
        if need.name not in step.needs or is_done(need, records, now):
            continue
        record = records.get(need.name, {})
        if record.get("status") == "skipped":
            return {"status": "skipped", "reason": record["reason"]}
        return {"status": "not begun", "reason": f"{need.name} is not done"}
    return None


def forget_what_needs(name: str, wanted: Sequence[Step], records: dict[str, Record]) -> None:
    """Results of a step that ran again are new, so what was done with the old ones is not done."""
    for step in wanted:
        if name in step.needs and step.name in records:
            records[step.name] = {"status": "not begun", "reason": f"{name} ran again"}
            forget_what_needs(step.name, wanted, records)


def read_records(folder: Path) -> dict[str, Record]:
    """What earlier calls wrote about the steps of a block."""
    file = folder / RECORDS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def run_step(step: Step, folder: Path, end: float, now: Record) -> Record:
    """Run a step until it ends or its time is over. end: of the block, on the monotonic clock"""
    dry = now["dry"]
    reason = obstacle(step, dry=dry)
    if reason is not None:
        return {"status": "skipped", "reason": reason}
    command = command_of(step, dry=dry)
    log = folder / f"{step.name}.log"
    old = log.stat().st_size if log.exists() else 0
    begin = time.monotonic()
    limit = min(step.seconds, end - begin)
    statuses = outcome(command, variables(step, dry=dry), log, limit)
    status = status_of(statuses)
    reason = refusal(step, log, old) if status == "failed" else None
    return {
        "status": "skipped" if reason else status,
        "reason": reason,
        "exit_statuses": statuses,
        "seconds": round(time.monotonic() - begin, 1),
        "command": command,
        "variables": step.variables,
        "torch": torch.__version__,
        **now,
    }


def obstacle(step: Step, *, dry: bool) -> str | None:
    """Why a step cannot run here, or None. Tests say it themselves, one by one."""
    missing = [one for one in step.packages if importlib.util.find_spec(one) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if step.program and dry:
        return "needs a CUDA device"
    if step.program and shutil.which(step.program[0]) is None:
        return f"not installed: {step.program[0]}"
    if step.tests or dry or torch.cuda.is_available():
        return None
    return "needs a CUDA device"


def refusal(step: Step, log: Path, old: int) -> str | None:
    """Why the machine did not let a step run, by its log after `old` bytes; None if it did."""
    text = log.read_bytes()[old:].decode(errors="replace")
    for mark, reason in step.refusals.items():
        if mark in text:
            return f"{mark}: {reason}"
    return None


def variables(step: Step, *, dry: bool) -> list[dict[str, str]]:
    """The environment of each process that a step is divided into."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    shared = {**os.environ, **step.variables, "PYTHONUNBUFFERED": "1"}
    shared["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if dry:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    parts = min(step.parts, max(1, (os.cpu_count() or 1) // CORES_OF_A_PART))
    if parts == 1:
        return [shared]
    return [{**shared, "TEST_PART": f"{number}/{parts}"} for number in range(parts)]


def outcome(
    command: list[str], environments: list[dict[str, str]], log: Path, limit: float
) -> list[int | None]:
    """Exit statuses of the processes; None for those that were stopped after `limit` seconds."""
    end = time.monotonic() + limit
    statuses: list[int | None] = []
    with log.open("ab") as output:
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
            )
            for env in environments
        ]
        try:
            for process in processes:
                statuses.append(wait(process, end))
        finally:
            stop(processes)
    return statuses


def wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and those that they started; a training writes its checkpoint first."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + SECONDS_TO_END
    for process in running:
        if wait(process, end) is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def status_of(statuses: Sequence[int | None]) -> str:
    """What the processes of a step came to; a part may have no test, but not all parts."""
    if any(status is None for status in statuses):
        return "stopped"
    with_tests = [status for status in statuses if status != NO_TESTS]
    if not with_tests or any(with_tests):
        return "failed"
    return FINISHED


def small_corpus(folder: Path) -> list[str]:
    """A corpus of this project's documents, for a dry run: the settings that name it."""
    prefix = folder / "data/docs/docs_text_document"
    if not prefix.with_suffix(".idx").exists():
        texts = [str(path) for path in sorted(ROOT.glob("docs/*.md"))]
        words = ["--input", *texts, "--name", "docs", "-t", "CharLevelTokenizer"]
        command = [sys.executable, "prepare_data.py", *words, "-d", str(folder / "data")]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return [f"data_path={prefix}"]


def summary(records: dict[str, Record]) -> str:
    """A table of the steps of a block in Markdown."""
    lines = []
    for name, record in records.items():
        seconds = record.get("seconds")
        lines.append([name, record["status"], str(seconds or "-"), record["reason"] or ""])
    return table(["step", "status", "seconds", "reason"], lines)


def pack(folder: Path, archive: Path) -> None:
    """All files of a folder but the weights of models, in one file that is replaced as a whole.

    folder and archive are absolute; an archive inside the folder is not packed into itself.
    """
    partial = archive.with_name(archive.name + ".partial")
    with tarfile.open(partial, "w:gz") as packed:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path in (archive, partial):
                continue
            if path.is_file() and "runs" not in inside.parts and "data" not in inside.parts:
                packed.add(path, inside)
    partial.replace(archive)


if __name__ == "__main__":
    sys.exit(main())
