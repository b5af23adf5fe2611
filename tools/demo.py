"""make demo: train the same small GPT with mep_free and with rotary at length 512, and measure both up to 16384.

Everything goes through the commands that a user types and lands in demo/; an interrupted demo continues where it was.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron.files import ROOT
from megatron.report.figures.curves import plot_perplexity
from megatron.results.files import read_results
from megatron.results.table import table

ENCODINGS = ("mep_free", "rotary")
FOLDER = Path("demo")


def main() -> int:
    os.chdir(ROOT)
    start = time.monotonic()
    side_by_side(
        {"prepare": ["prepare_data.py", "stdlib", "-d", f"{FOLDER}/data", "--vocab-size", "1024"]}
    )
    side_by_side({name: ["deepy.py", "train.py", *settings(name)] for name in ENCODINGS})
    results = {name: FOLDER / f"{name}.jsonl" for name in ENCODINGS}
    side_by_side(
        {
            f"evaluate {name}": ["deepy.py", "evaluate.py", *settings(name), "--output", str(path)]
            for name, path in results.items()
        }
    )
    rows = read_results(list(results.values()))
    plot_perplexity(
        rows, FOLDER / "perplexity.png", title="Trained at length 512: perplexity beyond it"
    )
    minutes = (time.monotonic() - start) / 60
    print(f"\n{table(rows)}\n\nplot: {FOLDER}/perplexity.png   ({minutes:.1f} minutes)")
    return 0


def settings(name: str) -> list[str]:
    return ["configs/demo.yml", f"pos_emb={name}", f"save={FOLDER}/{name}", f"load={FOLDER}/{name}"]


def side_by_side(commands: dict[str, list[str]]) -> None:
    """Run scripts at the same time, each on its share of the cores, with its name before every line of its output.

    Two processes of one thread do half as much again as one process of two, at this size. If one fails, so do all.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // len(commands))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    processes, relays, failed = {}, [], None
    for name, command in commands.items():
        processes[name] = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        relays.append(threading.Thread(target=relay, args=(name, processes[name])))
        relays[-1].start()
    try:
        while not failed and any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            failed = next((name for name, process in processes.items() if process.poll()), None)
    finally:
        for process in processes.values():
            process.terminate()
        for thread in relays:
            thread.join()
    failed = failed or next((name for name, process in processes.items() if process.wait()), None)
    if failed:
        print(
            f"demo: {failed} failed; its message is above. Run make demo again to continue.",
            file=sys.stderr,
        )
        sys.exit(1)


def relay(name: str, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"{name:>8} | {line.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
