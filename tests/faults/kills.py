"""Kill -9 at random moments: what is left must go on as if nothing had happened.

A chain is one run that is killed and started again until it is done. After every kill of a training
each of its checkpoints is compared with that of an undisturbed run; at the end all results are.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import PAUSE, Forks

STEPS = 12
MODEL = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    "seq_length=64",
    "pos_emb=mep_param",
    "hidden_dropout=0.1",
    "tokenizer_type=CharLevelTokenizer",
]
RECIPE = [
    f"train_iters={STEPS}",
    "save_interval=2",
    "log_interval=1",
    "eval_interval=4",
    "eval_iters=1",
    "optimizer.params.lr=3e-3",
]
LONGEST = 30  # seconds after which the ranks of a killed one are ended, as a launcher would
CLOCK = ("seconds", "tokens_per_second", "checksum")
"""Keys of a row that no two measurements share; its sum is over the others, too."""


@dataclass(frozen=True)
class Command:
    """A command that is killed.

    words: those that work in a folder; result: what must be equal, read from that folder;
    parts: what is there of it after a kill, by name
    """

    words: Callable[[Path], list[str]]
    result: Callable[[Path], Any]
    parts: Callable[[Path], dict[str, str]] = lambda folder: {}
    saves: bool = False  # whether it writes checkpoints
    ranks: int = 1
    all_die: bool = True  # whether a kill takes all ranks or one


def check_kills(forks: Forks, command: Command, folder: Path, *, kills: int, seed: int) -> None:
    """Kill a command that often, start it again, and compare what it leaves and writes."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    whole = folder / "whole"
    begin = time.monotonic()
    pids = _start(forks, command, whole)
    assert not any([forks.wait(pid) for pid in pids]), _log(whole).read_text()
    seconds = time.monotonic() - begin
    expected, parts = command.result(whole), command.parts(whole)

    while kills > 0:
        run = folder / "chain"
        done = False
        while not done:
            pids = _start(forks, command, run)
            if kills > 0 and _moment_comes(forks, command, pids, run, seconds, chance):
                _kill(forks, command, pids, run, chance)
                kills -= 1
            else:
                statuses = [forks.wait(pid) for pid in pids]
                assert not any(statuses), _log(run).read_text()
                done = True
            for name, digest in command.parts(run).items():
                assert digest == parts[name], f"{name}: not as in the undisturbed run"
        assert (command.result(run), command.parts(run)) == (expected, parts)
        shutil.rmtree(run)


def _start(forks: Forks, command: Command, folder: Path) -> list[int]:
    folder.mkdir(exist_ok=True)
    script, *words = command.words(folder)
    return forks.start_ranks(command.ranks, script, *words, log=_log(folder))


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _moment_comes(
    forks: Forks,
    command: Command,
    pids: list[int],
    folder: Path,
    seconds: float,
    chance: random.Random,
) -> bool:
    """Wait for any moment of a run, or of the writing of a checkpoint; whether all still run."""
    # torch waits half an hour for a rank that ends while the engine connects; a launcher would
    # end the others. Here nobody does, so a step must have been logged.
    log = _log(folder)
    earlier = log.stat().st_size if log.exists() else 0
    waits_for_loop = not command.all_die
    aims_at_saving = command.saves and chance.random() < 0.5
    end = time.monotonic() + chance.uniform(0, seconds)
    while time.monotonic() < end or aims_at_saving or waits_for_loop:
        if any(forks.poll(pid) is not None for pid in pids):
            return False
        if waits_for_loop and log.exists() and b"  loss " in log.read_bytes()[earlier:]:
            waits_for_loop = False
            end = time.monotonic() + chance.uniform(0, seconds)
        # An earlier kill may have left a partial checkpoint, so this waits for the loop, too.
        is_saving = time.monotonic() >= end and any(folder.glob("partial_step*"))
        if aims_at_saving and is_saving and not waits_for_loop:
            time.sleep(chance.uniform(0, 0.03))
            break
        time.sleep(PAUSE)
    return True


def _kill(
    forks: Forks, command: Command, pids: list[int], folder: Path, chance: random.Random
) -> None:
    victims = pids if command.all_die else [chance.choice(pids)]
    earlier = 0 if command.all_die else _log(folder).stat().st_size
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        # gloo (torch 2.13) waits half an hour for the rest of a message whose sender has died.
        with contextlib.suppress(TimeoutError):
            forks.wait(pid, timeout=LONGEST)
    statuses = [forks.wait(pid) for pid in pids]
    # Where all are killed, nobody is left to notice; one may have ended well a moment before.
    if not command.all_die and not (folder / f"global_step{STEPS}").exists():
        assert all(statuses), "the rank of a killed one went on"
        if 1 in statuses:
            message = _log(folder).read_bytes()[earlier:]
            assert b"another process of this run has ended" in message


def trainings(corpus: Path) -> list[Command]:
    """The kinds of runs that are killed. corpus: prefix of a token file"""

    def weights(run: Path) -> dict[str, str]:
        digests = {}
        for path in run.glob("global_step*/model.safetensors"):
            digests[path.parent.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return digests

    def losses(run: Path) -> list[tuple[int, str, float]]:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], record["kind"], record["loss"]) for record in records]

    def training(*settings: str, ranks: int = 1, all_die: bool = True) -> Command:
        def words(run: Path) -> list[str]:
            places = [f"data_path={corpus}", f"save={run}", f"load={run}"]
            batch = f"train_micro_batch_size_per_gpu={4 // ranks}"
            return ["train.py", *MODEL, *RECIPE, *settings, *places, batch]

        return Command(words, losses, weights, True, ranks, all_die)

    stage = "zero_optimization.stage="
    return [
        training(),
        training(f"{stage}2", ranks=2, all_die=False),
        training("precision=bf16", f"{stage}1"),
        training(f"{stage}3"),
        training("precision=bf16", ranks=2),
    ]


def evaluation(checkpoint: Path) -> Command:
    """The command that measures a checkpoint at three lengths, and its rows."""

    def words(folder: Path) -> list[str]:
        lengths = ["--lengths", "64", "256", "1024", "--output", str(folder / "rows.jsonl")]
        tokens = ["eval_tokens=16384", "eval_batch_tokens=1024"]
        return ["evaluate.py", "--checkpoint", str(checkpoint), *lengths, *tokens]

    def result(folder: Path) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        return [{key: row[key] for key in row if key not in CLOCK} for row in rows]

    return Command(words, result)


def preparation(texts: Path) -> Command:
    """The command that writes token files of a folder of texts, and their bytes."""

    def words(folder: Path) -> list[str]:
        # A run that was killed after its work finds its corpus, which is no fault.
        tokenizer = ["--vocab-size", "1024", "--overwrite"]
        places = ["--input", str(texts), "--name", "t", "-d", str(folder)]
        return ["prepare_data.py", *places, *tokenizer]

    def result(folder: Path) -> list[bytes]:
        prefix = folder / "t" / "t_text_document"
        return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]

    return Command(words, result)
