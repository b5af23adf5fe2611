"""Speed and memory of prepare_data.py beside the bare library, in alternating runs.

python tools/bench/tokenise.py texts.jsonl.zst --vocab-file vocab.json --merge-file merges.txt

Each run is a new process. "bare" reads the same documents and calls `tokenizers.encode_batch` on a
thousand at a time, and writes nothing. Its ids are compared with those in the token files.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tokenizers
from bench_tables import table

from megatron.cli_errors import guarded
from megatron.data.readers.files import Files
from megatron.data.tokens import TokenFile, dtype_for
from megatron.errors import UserError
from megatron.files import ROOT

MB = 1_000_000
TOGETHER = 1000  # documents that the bare library gets at once
LOOK = 0.05  # seconds between two looks at the memory
END = "<|endoftext|>"
COLUMNS = ("what", "workers", "wall s", "MB/s", "tokens/s", "CPU s", "peak MiB", "load")


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.bare_only:
        print(json.dumps(bare(options)))
        return 0
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for what in ("prepare_data.py",) if options.without_bare else ("bare", "prepare_data.py"):
            for workers in options.workers:
                runs.setdefault((what, workers), []).append(measured(options, what, workers))
    print(table(COLUMNS, [row(*key, found) for key, found in runs.items()]))
    print("\n".join(conclusions(runs)))
    return 0


def measured(options: argparse.Namespace, what: str, workers: int) -> dict[str, Any]:
    """Seconds, CPU seconds, MiB and tokens of one run."""
    files = ["--vocab-file", str(options.vocab_file), "--merge-file", str(options.merge_file)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        words = [__file__, *map(str, options.inputs), "--bare-only"]
        if what != "bare":
            words = [str(ROOT / "prepare_data.py"), "--input", *map(str, options.inputs)]
            words += ["--name", "c", "-d", folder, "--workers", str(workers)]
        load = os.getloadavg()[0]
        found = watched([sys.executable, *words, *files], workers)
        if what != "bare":
            tokens = TokenFile.open(Path(folder, "c", "c_text_document"))
            found["text_bytes"] = tokens.meta["text_bytes"]
            found["tokens"] = tokens.tokens
            found["sha256"] = tokens.meta["sha256"]["bin"]
    return found | {"load": load}


def watched(command: list[str], workers: int) -> dict[str, Any]:
    """Run a command; its seconds, and the memory and CPU time of it and its children."""
    threads = {"RAYON_NUM_THREADS": str(workers), "PYTHONPATH": str(ROOT)}
    before = os.times()
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(LOOK)
    seconds = time.perf_counter() - started
    after = os.times()
    output = process.communicate()[0]
    if process.returncode:
        raise UserError(f"{' '.join(command)}: ended with {process.returncode} - see its message")
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    found = json.loads(output) if output.startswith("{") else {}
    return {"wall": seconds, "cpu": cpu, "memory": peak} | found


def memory_of(pid: int) -> int:
    """Bytes that a process and its children have for themselves or share with each other."""
    try:
        first = psutil.Process(pid)
        processes = [first, *first.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)
    except psutil.Error:  # one has just ended
        return 0


def bare(options: argparse.Namespace) -> dict[str, Any]:
    """What the library does by itself with the documents of the input."""
    inner = tokenizers.ByteLevelBPETokenizer.from_file(
        str(options.vocab_file), str(options.merge_file)
    )
    inner._tokenizer.encode_special_tokens = True
    dtype = dtype_for(inner.get_vocab_size())
    end = inner.token_to_id(END)
    digest = hashlib.sha256()
    count = text_bytes = 0
    cpu = seconds = 0.0
    documents = filter(None, Files("c", options.inputs).documents())
    for texts in lists_of(documents, TOGETHER):
        cpu_before, before = time.process_time(), time.perf_counter()
        ids_of_texts = [encoding.ids for encoding in inner.encode_batch(texts)]
        cpu += time.process_time() - cpu_before
        seconds += time.perf_counter() - before
        for text, ids in zip(texts, ids_of_texts, strict=True):
            text_bytes += len(text.encode())
            count += len(ids) + 1
            digest.update(np.array([*ids, end], dtype).tobytes())
    sums = {"tokens": count, "text_bytes": text_bytes, "sha256": digest.hexdigest()}
    return sums | {"cpu": cpu, "wall": seconds}


def lists_of(documents: Iterator[str], size: int) -> Iterator[list[str]]:
    while found := list(islice(documents, size)):
        yield found


def row(what: str, workers: int, runs: list[dict[str, Any]]) -> list[str]:
    """The medians of several runs."""
    middle = {
        key: statistics.median(run[key] for run in runs)
        for key in ("wall", "cpu", "memory", "load")
    }
    rates = (runs[0]["text_bytes"] / MB / middle["wall"], runs[0]["tokens"] / middle["wall"])
    cells = [f"{middle['wall']:.1f}", f"{rates[0]:.1f}", f"{rates[1]:,.0f}"]
    cells += [f"{middle['cpu']:.1f}", f"{middle['memory'] / 2**20:.0f}", f"{middle['load']:.1f}"]
    return [what, str(workers), *cells]


def conclusions(runs: dict[tuple[str, int], list[dict[str, Any]]]) -> Iterator[str]:
    """Whether the ids agree, and what a second worker is worth in runs beside each other."""
    one = next(iter(runs.values()))[0]
    same = len({run["sha256"] for found in runs.values() for run in found}) == 1
    yield f"\n{one['tokens']:,} tokens with their ends, {one['text_bytes']:,} bytes of text;"
    yield "all runs have the same ids" if same else "THE IDS DIFFER"
    fewest = min(workers for _, workers in runs)
    for what, workers in runs:
        if workers > fewest:
            pairs = zip(runs[what, fewest], runs[what, workers], strict=True)
            gains = [slow["wall"] / fast["wall"] for slow, fast in pairs]
            ideal = workers / fewest
            shown = ", ".join(f"{gain:.2f}" for gain in gains)
            share = statistics.median(gains) / ideal
            yield f"{what}: {workers} workers are {shown} times as fast: {share:.2f} of the ideal"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, help="files that prepare_data.py --input reads")
    add("--vocab-file", type=Path, required=True, help="GPT-2's vocab.json")
    add("--merge-file", type=Path, required=True, help="GPT-2's merges.txt")
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--rounds", type=int, default=3, help="of each measurement (default: 3)")
    add("--folder", type=Path, help="where token files are written (default: for temporary files)")
    add("--without-bare", action="store_true", help="leave the bare library out")
    add("--bare-only", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
