"""make demo: train a small GPT with mep_free and with rotary at 512, measure both up to 16384.

Everything goes through the commands that a user types. The results are in demo/. An interrupted
demo continues where it was.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.files import ROOT
from megatron.report.figures.curves import plot_perplexity
from megatron.results.files import read_results
from megatron.results.table import table

ENCODINGS = ("mep_free", "rotary")
FOLDER = Path("demo")


@guarded
def main() -> int:
    os.chdir(ROOT)
    start = time.monotonic()
    side_by_side(
        {"prepare": ["prepare_data.py", "stdlib", "-d", f"{FOLDER}/data", "--vocab-size", "1024"]}
    )
    side_by_side({name: ["deepy.py", "train.py", *settings(name)] for name in ENCODINGS})

    results = [FOLDER / f"{name}.jsonl" for name in ENCODINGS]
    evaluations = {}
    for name, path in zip(ENCODINGS, results, strict=True):
        command = ["deepy.py", "evaluate.py", *settings(name), "--output", str(path)]
        evaluations[f"evaluate {name}"] = command
    side_by_side(evaluations)

    rows = read_results(results)
    title = "Trained at length 512: perplexity beyond it"
    plot_perplexity(rows, FOLDER / "perplexity.png", title=title)
    minutes = (time.monotonic() - start) / 60
    print(f"\n{table(rows)}\n\nplot: {FOLDER}/perplexity.png   ({minutes:.1f} minutes)")
    return 0


def settings(name: str) -> list[str]:
    return ["configs/demo.yml", f"pos_emb={name}", f"save={FOLDER}/{name}", f"load={FOLDER}/{name}"]


def side_by_side(commands: dict[str, list[str]]) -> None:
    """Run scripts at the same time, each on its share of the cores.

    Each line of their output begins with the name of its script. If one fails, all end. At this
    size two processes of one thread do half as much again as one process of two.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // len(commands))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    processes: dict[str, subprocess.Popen[str]] = {}
    relays: list[threading.Thread] = []
    for name, command in commands.items():
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes[name] = process
        relays.append(threading.Thread(target=relay, args=(name, process)))
        relays[-1].start()

    failed = None
    try:
        while failed is None and any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            failed = first_failure(processes)
    finally:
        for process in processes.values():
            process.terminate()
        for thread in relays:
            thread.join()
        for process in processes.values():
            process.wait()

    failed = failed or first_failure(processes)
    if failed:
        message = f"demo: {failed} failed; its message is above. Run make demo again to continue."
        print(message, file=sys.stderr)
        sys.exit(1)


def first_failure(processes: dict[str, subprocess.Popen[str]]) -> str | None:
    """The name of a process that has ended with a status other than 0."""
    return next((name for name, process in processes.items() if process.poll()), None)


def relay(name: str, process: subprocess.Popen[str]) -> None:
    """Print each line of a process with its name before it."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name:>8} | {line.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
