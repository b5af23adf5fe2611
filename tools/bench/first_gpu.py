"""Test and time everything on a machine with a GPU, in three blocks of under ten minutes.

python tools/bench/first_gpu.py 1 2 3 --output gpu-check
python tools/bench/first_gpu.py 1 2 3 --output dry --dry

Every step writes its files as it goes, below OUTPUT/blockN. The same command again runs what is
missing: steps that failed, that were stopped, that had not begun, and that were done with another
commit, device or command. A dry run has the same commands with small sizes on the CPU.
docs/first_gpu.md says what each figure decides.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import positive, report_progress, table

from megatron.cli_errors import guarded
from megatron.commit import commit
from megatron.errors import UserError, did_you_mean
from megatron.files import write_text

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 20  # that a stopped step has to write what it has
NO_TESTS = 5  # exit status of pytest where there is none to run
ENCODINGS = ["kerple_log", "alibi", "rotary", "mep_free"]
LENGTHS = ["512", "2048", "4096", "16384"]
PYTEST = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
ATTENTION = "tools/bench/attention.py"
KERNEL = ["--only", "triton", "plain", "--required", "triton", "--rounds", "7", "--seconds", "2"]

# What a dry run adds to a command line. The last value of an option counts.
QUICK = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--seconds", "1", "--no-memory"]
SMALL_HEADS = ["--tokens", "32", "--heads", "2", "--head_dim", "16"]
SMALL_ATTENTION = [*QUICK, "--lengths", "32", *SMALL_HEADS, "--required"]  # nothing is
SMALL_MODEL = ["--hidden", "32", "--layers", "1", "--heads", "2", "--vocab", "64", "--batch", "1"]
SMALL_STEP = [*QUICK, *SMALL_MODEL, "--train_length", "16", "--eager", "--lengths"]
SMALL_RUN = [
    "num_layers=1",
    "hidden_size=32",
    "num_attention_heads=2",
    "seq_length=32",
    "train_batch_size=2",
    "train_micro_batch_size_per_gpu=2",
    "precision=fp32",
    "eval_tokens=128",
    "eval_lengths=[32,64]",
    "eval_iters=1",
    "split=8,1,1",
    "train_iters=3",
    "lr_decay_iters=3",
]
Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One command of a block.

    name: its files begin with it
    words: of the command line, after Python's
    seconds: after which it is stopped
    small: words that a dry run adds
    parts: into how many processes its tests may be divided
    packages: without which it is skipped
    needs: names of earlier steps, without which it does not begin
    """

    name: str
    words: list[str]
    seconds: float
    small: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    parts: int = 1
    packages: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def steps(block: int, folder: Path, data: Sequence[str], train_iters: int) -> list[Step]:
    """What a block runs, in order: what decides most comes first.

    folder: of its results; data: YAML files and settings that name a corpus
    """

    def tests(name: str, words: list[str], seconds: float) -> Step:
        command = [*PYTEST, "-m", "gpu", *words]
        return Step(name, command, seconds, variables={"TEST_GPU": "1"}, parts=8)

    def bench(name: str, words: list[str], small: list[str], seconds: float) -> Step:
        output = ["--output", str(folder / f"{name}.json")]
        return Step(name, [*words, *output], seconds, small)

    def attention(name: str, words: list[str]) -> Step:
        return bench(name, [ATTENTION, *KERNEL, *words], SMALL_ATTENTION, 90)

    if block == 1:
        narrow = ["--dtypes", "bfloat16", "--lengths", "2048", "16384"]
        narrow += ["--tables", "frozen", "learned"]
        trace = ["tools/bench/step.py", "--encodings", "kerple_log", "--eager", "--rounds", "3"]
        trace += ["--trace", str(folder / "trace.json.gz"), "--lengths"]
        return [
            tests("tests_cuda", ["tests/attention/test_cuda.py", "-k", "not flex", "-x"], 120),
            tests("tests_triton", ["tests/attention/test_triton.py", "-x"], 150),
            attention("attention_first", narrow),
            bench("trace", trace, SMALL_STEP, 60),
        ]
    if block == 2:
        every = ["--dtypes", "bfloat16", "--lengths", *LENGTHS]
        first = "rotary"  # the others are compared with it
        options = ["--encodings", first, *(name for name in ENCODINGS if name != first)]
        whole = ["tools/bench/step.py", *options, "--rounds", "7", "--seconds", "4", "--lengths"]
        compiled = [*SMALL_STEP, "--encodings", "rotary"]
        return [
            tests("tests_random", ["tests/attention/test_random.py"], 120),
            attention("attention_64", every),
            attention("attention_128", [*every, "--head_dim", "128"]),
            bench("steps", [*whole, "16384"], [*SMALL_STEP, "16"], 120),
            bench("steps_compiled", [*whole, "--compile"], compiled, 120),
            tests("tests_flex", ["tests/attention/test_cuda.py", "-k", "flex"], 150),
            tests("tests_engine", ["tests/test_gpu.py", "tests/test_no_sync.py"], 180),
        ]
    found = []
    for name in ENCODINGS:
        run = str(folder / "runs" / name)
        settings = [f"train_iters={train_iters}", f"lr_decay_iters={train_iters}"]
        settings += [f"save={run}", f"load={run}", "log_interval=20", "eval_interval=0"]
        settings += ["keep_last_n_checkpoints=1"]
        files = ["configs/125M.yml", *data, f"configs/pos_emb/{name}.yml"]
        packages = ["deepspeed", "pydantic", "yaml", "safetensors"]
        words = ["train.py", *files, *settings]
        found.append(Step(f"train_{name}", words, 150, SMALL_RUN, packages=packages))

        output = ["--output", str(folder / f"{name}.jsonl"), "eval_tokens=1048576"]
        lengths = ["--lengths", "512", "1024", "2048", "4096", "8192", "16384"]
        words = ["evaluate.py", "--checkpoint", run, *output, *lengths]
        small = ["eval_tokens=128", "--lengths", "32", "64"]
        needs = [f"train_{name}"]
        evaluate = f"evaluate_{name}"
        found.append(Step(evaluate, words, 75, small, packages=packages[1:], needs=needs))
    rows = [str(folder / f"{name}.jsonl") for name in ENCODINGS]
    words = ["tools/compare.py", *rows, "--against", "rotary"]
    words += ["--output", str(folder / "table.md")]
    needs = [f"evaluate_{name}" for name in ENCODINGS]
    return [*found, Step("table", words, 60, packages=["pydantic", "yaml"], needs=needs)]


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
    data = ["configs/data/openwebtext2.yml"]
    corpus = "the corpus of block 3; default: %(default)s"
    add("--data", nargs="+", default=data, metavar="FILE|key=value", help=corpus)
    add("--train_iters", type=positive, default=2000, metavar="N", help="of each run of block 3")
    options = parser.parse_args(argv)
    output = (options.output or Path("dry" if options.dry else "gpu-check")).resolve()
    known = [step.name for block in options.blocks for step in steps(block, output, [], 1)]
    for name in options.steps or []:
        if name not in known:
            hint = did_you_mean(name, known) or f"use {', '.join(known)}"
            raise UserError(f"--steps: these blocks have no step {name!r}; {hint}")

    # Leave as an exception does, so that the step that runs is ended too.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    records = []
    try:
        for block in options.blocks:
            folder = output / f"block{block}"
            folder.mkdir(parents=True, exist_ok=True)
            data = small_corpus(folder) if options.dry and block == 3 else options.data
            wanted = steps(block, folder, data, options.train_iters)
            of_block = run_steps(wanted, folder, options)
            print(f"block {block}\n\n{summary(of_block)}")
            records += of_block.values()
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(any(one["status"] not in ("done", "skipped") for one in records))


def run_steps(
    wanted: Sequence[Step], folder: Path, options: argparse.Namespace
) -> dict[str, Record]:
    """Run what is missing of these steps; their records by name."""
    end = time.monotonic() + 60 * options.minutes
    on_gpu = torch.cuda.is_available() and not options.dry
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    now = {"dry": options.dry, "device": device, "commit": commit()}
    file = folder / "steps.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    records = {step.name: earlier[step.name] for step in wanted if step.name in earlier}
    for step in wanted:
        words = [*step.words, *step.small] if options.dry else step.words
        same = {**now, "command": [sys.executable, *words]}
        record = records.get(step.name, {})
        is_done = record.get("status") == "done" and record == {**record, **same}
        chosen = not is_done if options.steps is None else step.name in options.steps
        if not chosen:
            continue
        missing = [name for name in step.needs if records[name]["status"] != "done"]
        if missing:
            record = {"status": "not begun", "reason": f"{missing[0]} is not done"}
        elif time.monotonic() > end:
            record = {"status": "not begun", "reason": "the block's time is over"}
        else:
            report_progress(f"{folder.name}: {step.name}")
            record = run_step(step, folder, end, same)
        records[step.name] = record
        write_text(file, json.dumps(records, indent=1) + "\n")
        write_text(folder / "summary.md", summary(records))
    return records


def run_step(step: Step, folder: Path, end: float, same: Record) -> Record:
    """Run a step until it ends or its time is over.

    end: of the block, on the monotonic clock; same: its command and the conditions
    """
    dry = same["dry"]
    missing = [one for one in step.packages if importlib.util.find_spec(one) is None]
    is_test = "gpu" in step.words  # tests say themselves, one by one, what they need
    reason = None
    if missing:
        reason = f"not installed: {', '.join(missing)}"
    elif not (is_test or dry or torch.cuda.is_available()):
        reason = "needs a CUDA device"
    if reason:
        return {"status": "skipped", "reason": reason}

    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    shared = {**os.environ, **step.variables, "PYTHONUNBUFFERED": "1"}
    shared["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if dry:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    parts = min(step.parts, max(1, (os.cpu_count() or 1) // 2))
    begin = time.monotonic()
    until = min(begin + step.seconds, end)
    statuses: list[int | None] = []
    with (folder / f"{step.name}.log").open("ab") as log:
        processes = [
            subprocess.Popen(
                same["command"],
                cwd=ROOT,
                env={**shared, "TEST_PART": f"{number}/{parts}"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for number in range(parts)
        ]
        try:
            statuses = [wait(process, until) for process in processes]
        finally:
            stop(processes)
    return {
        "status": status_of(statuses),
        "reason": None,
        "exit_statuses": statuses,
        "seconds": round(time.monotonic() - begin, 1),
        "variables": step.variables,
        "torch": torch.__version__,
        **same,
    }


def wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    """The exit status, or None if the process still runs at `end`, on the monotonic clock."""
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
    if None in statuses:
        return "stopped"
    with_tests = [status for status in statuses if status != NO_TESTS]
    return "failed" if any(with_tests) or not with_tests else "done"


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
        seconds = str(record.get("seconds") or "-")
        lines.append([name, record["status"], seconds, record["reason"] or ""])
    return table(["step", "status", "seconds", "reason"], lines)


if __name__ == "__main__":
    sys.exit(main())
