"""The whole campaign of faults, and its table: `make faults`.

python -m tests.faults [--seed 1] [--kills 110] [-o faults.md]
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.parallel.grid import connect
from tests.checkpoints import make_checkpoint
from tests.faults import damage, restarts, universal
from tests.faults.kills import KINDS, Campaign, Tally
from tests.forks import Forks
from tests.support import make_corpus, modules, run

KILLS_OF_OTHERS = 10  # in evaluation, and in preparing data
PARTS_OF_SUITE = {
    "bad input": (["tests/bad_inputs"], "one message, its status, nothing lost"),
    "full or read-only disk": (
        ["tests/faults/test_full_disk.py", "tests/training/test_metric_logs.py"],
        "one message, nothing lost",
    ),
    "signal, lost or frozen rank": (
        [
            "tests/parallel/test_launcher.py",
            "tests/parallel/test_watchdog.py",
            "tests/training/test_stop.py",
            "tests/sweeps/test_signals.py",
        ],
        "ends with its status, saved where it can",
    ),
    "long tests of the suite": (["-m", "campaign", "tests"], "as each of them says"),
    "two owners of one folder": (
        ["tests/test_owner.py", "tests/training/test_folders.py"],
        "the second one is refused",
    ),
}
"""Faults whose every case is a test of the suite: words for pytest, and what must happen."""


@dataclass(frozen=True)
class Line:
    """A line of the table. faults: what went wrong, each in a sentence."""

    fault: str
    tried: int
    outcome: str
    faults: list[str]
    seconds: float


def main() -> int:
    options = _parser().parse_args()
    begin = time.monotonic()
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for line in campaign(Path(name), options.kills, options.seed):
            lines.append(line)
            print(f"{line.fault}: {line.tried}, {len(line.faults)} wrong", flush=True)
            for fault in line.faults:
                print(f"  {fault}", flush=True)
    text = table(lines)
    print(f"\n{text}\n{time.monotonic() - begin:.0f} seconds, seed {options.seed}")
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return int(any(line.faults for line in lines))


def campaign(folder: Path, kills: int, seed: int) -> Iterator[Line]:
    """Every part of the campaign, one line after the other."""
    corpus = make_corpus(_made(folder / "corpus"))
    with Forks() as forks:
        yield from _kills(forks, corpus, folder, kills, seed)
        yield from _restarts(forks, corpus, folder, seed)
        yield from _damage(forks, corpus, folder / "damage")
        yield _other_engines(forks, corpus, _made(folder / "engines"))
    for fault, (files, outcome) in PARTS_OF_SUITE.items():
        yield _part_of_suite(fault, files, outcome)


def _kills(forks: Forks, corpus: Path, folder: Path, kills: int, seed: int) -> Iterator[Line]:
    """Kills in training, shared out over the kinds of runs."""
    for number, kind in enumerate(KINDS):
        begin = time.monotonic()
        runs = folder / f"kills{number}"
        tally = Campaign(forks, kind, corpus, runs, seed + number).run(kills // len(KINDS))
        seconds = time.monotonic() - begin
        outcome = f"{tally.while_saving} while saving; resumed runs equal the undisturbed one"
        if not kind.all_die:
            outcome += f"; the other rank ended within {tally.longest:.0f} s"
        yield Line(f"kill -9 in training: {kind.name}", tally.kills, outcome, tally.faults, seconds)


def _restarts(forks: Forks, corpus: Path, folder: Path, seed: int) -> Iterator[Line]:
    """Kills in evaluation and in preparing data."""
    texts = _made(folder / "texts")
    for number, text in enumerate(modules()):
        (texts / f"{number:03}.txt").write_text(text, encoding="utf-8")
    checkpoint = make_checkpoint(folder / "checkpoint", corpus)
    commands = {
        "evaluation": restarts.evaluation(checkpoint),
        "preparing data": restarts.preparation(texts),
    }
    for name, command in commands.items():
        begin = time.monotonic()
        tally: Tally = restarts.killed(
            forks, *command, folder / name, kills=KILLS_OF_OTHERS, seed=seed
        )
        outcome = "started again, the files are the same"
        seconds = time.monotonic() - begin
        yield Line(f"kill -9 in {name}", tally.kills, outcome, tally.faults, seconds)


def _damage(forks: Forks, corpus: Path, folder: Path) -> Iterator[Line]:
    """Every file of a checkpoint damaged in every way, for every kind of engine."""
    for kind in damage.KINDS:
        yield _damaged(forks, corpus, _made(folder / kind), kind, ranks=1)
    yield _damaged(forks, corpus, _made(folder / "ranks"), "zero2", ranks=2)


def _damaged(forks: Forks, corpus: Path, here: Path, kind: str, *, ranks: int) -> Line:
    begin = time.monotonic()
    with damage.own_encoding(here):
        words = damage.words(corpus, here, kind)
        log = here / "log"
        pids = forks.start_ranks(ranks, "train.py", *words, log=log)
        statuses = [forks.wait(pid) for pid in pids]
        assert not any(statuses), log.read_text()
        # One rank resumes them all: with as many windows in a step.
        same_batch = f"train_micro_batch_size_per_gpu={4 * ranks}"
        found = damage.found_by_use(corpus, here, kind, connect(), same_batch)
    faults = []
    for one in found:
        if one.message is None:
            faults.append(f"{one.use}: {one.file} {one.damage} was not noticed")
        elif not one.named:
            faults.append(f"{one.use}: {one.file} {one.damage} is not named: {one.message}")
    files = len({one.file for one in found})
    outcome = f"{files} files; each is noticed and named, on resume and evaluation"
    name = f"damaged checkpoint: {kind}, {ranks} rank(s)"
    return Line(name, len(found), outcome, faults, time.monotonic() - begin)


def _other_engines(forks: Forks, corpus: Path, folder: Path) -> Line:
    """Checkpoints that an engine of another kind continues."""
    begin = time.monotonic()
    found = universal.differences(forks, corpus, folder, universal.ring())
    faults = []
    for (writer, reader), (gap, allowed) in found.items():
        if gap > allowed:
            faults.append(f"{writer} continued by {reader}: losses differ by {gap:.1e}")
    largest = max(gap for (writer, reader), (gap, _) in found.items() if not reader.rounds)
    outcome = (
        f"losses differ by at most {largest:.0e}; bf16 with ZeRO 2 and 3, where 1e-3 is allowed,"
        " is not in this figure"
    )
    seconds = time.monotonic() - begin
    return Line("other ranks or ZeRO stage on resume", len(found), outcome, faults, seconds)


def _part_of_suite(fault: str, files: list[str], outcome: str) -> Line:
    """The tests of some files, as one line."""
    begin = time.monotonic()
    words = ["-m", "pytest", "-q", "-n", "2", *files]
    done = run(*words, env={"CAMPAIGN": "1"}, timeout=900)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        failed = [f"pytest ended with status {done.returncode}: {done.stdout[-500:]}"]
    tried = (int(passed[1]) if passed else 0) + len(failed)
    return Line(fault, tried, outcome, failed, time.monotonic() - begin)


def table(lines: list[Line]) -> str:
    """The table in Markdown."""
    head = "| fault | tried | wrong | what happened | seconds |\n|---|---:|---:|---|---:|"
    rows = []
    for line in lines:
        counts = f"{line.tried} | {len(line.faults)}"
        rows.append(f"| {line.fault} | {counts} | {line.outcome} | {line.seconds:.0f} |")
    return "\n".join([head, *rows])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    parser.add_argument("--kills", type=int, default=110, help="in training")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the table as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
