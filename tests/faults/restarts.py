"""Kill -9 in evaluation and in preparing data: started again, they give the same files."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.kills import Tally
from tests.forks import PAUSE, Forks

CLOCK = ("seconds", "tokens_per_second", "checksum")
"""Keys of a row that no two measurements share; its sum is over the others, too."""

Words = Callable[[Path], list[str]]
Result = Callable[[Path], Any]


def killed(
    forks: Forks, words: Words, result: Result, folder: Path, *, kills: int, seed: int
) -> Tally:
    """Kill a command that often, start it again, and compare what it writes.

    words: the command that works in a folder; result: what must be equal, read from that folder
    """
    chance, tally = random.Random(seed), Tally()
    whole = folder / "whole"
    whole.mkdir(parents=True)
    begin = time.monotonic()
    status = forks.wait(forks.start(*words(whole), log=folder / "whole.log"))
    assert status == 0, (folder / "whole.log").read_text()
    seconds = time.monotonic() - begin
    expected = result(whole)
    while tally.kills < kills:
        here = folder / f"chain{tally.chains}"
        here.mkdir()
        log = here.with_suffix(".log")
        while tally.kills < kills:
            pid = forks.start(*words(here), log=log)
            end = time.monotonic() + chance.uniform(0, seconds)
            while time.monotonic() < end and forks.poll(pid) is None:
                time.sleep(PAUSE)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if forks.wait(pid) != -signal.SIGKILL:
                break
            tally.kills += 1
        status = forks.wait(forks.start(*words(here), log=log))
        if status:
            tally.faults.append(f"{here}: status {status}: {log.read_text()[-2000:]}")
        elif result(here) != expected:
            tally.faults.append(f"{here}: another result than undisturbed")
        tally.chains += 1
        if not tally.faults:
            shutil.rmtree(here)
    return tally


def evaluation(checkpoint: Path) -> tuple[Words, Result]:
    """The command that measures a checkpoint at three lengths, and its rows."""

    def words(here: Path) -> list[str]:
        lengths = ["--lengths", "64", "256", "1024"]
        output = ["--output", str(here / "rows.jsonl")]
        tokens = ["eval_tokens=16384", "eval_batch_tokens=1024"]
        return ["evaluate.py", "--checkpoint", str(checkpoint), *lengths, *output, *tokens]

    def result(here: Path) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
        return [{key: row[key] for key in row if key not in CLOCK} for row in rows]

    return words, result


def preparation(texts: Path) -> tuple[Words, Result]:
    """The command that writes token files of a folder of texts, and their bytes."""

    def words(here: Path) -> list[str]:
        # A run that was killed after its work finds its corpus, which is no fault.
        tokenizer = ["--vocab-size", "1024", "--overwrite"]
        return [
            "prepare_data.py",
            "--input",
            str(texts),
            "--name",
            "t",
            "-d",
            str(here),
            *tokenizer,
        ]

    def result(here: Path) -> dict[str, bytes]:
        prefix = here / "t" / "t_text_document"
        return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")}

    return words, result
