"""Kill -9 at random moments: what is left must go on as if nothing had happened.

A chain is one run that is killed and started again until it is done. After every kill each of its
checkpoints is compared with the checkpoint of an undisturbed run, weight by weight; at the end the
losses are compared, bit for bit.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

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
OWNER = ".owner"  # a run owns its folder when its ranks have met
LONGEST = 60  # seconds in which the ranks of a killed one must have ended


@dataclass(frozen=True)
class Kind:
    """A kind of run. ranks: processes; all_die: whether a kill takes all of them or one."""

    name: str
    settings: list[str]
    ranks: int = 1
    all_die: bool = True


KINDS = (
    Kind("fp32", []),
    Kind("bf16, ZeRO 1", ["precision=bf16", "zero_optimization.stage=1"]),
    Kind("fp32, ZeRO 3", ["zero_optimization.stage=3"]),
    Kind("two ranks, ZeRO 2, one dies", ["zero_optimization.stage=2"], ranks=2, all_die=False),
    Kind("two ranks, bf16, both die", ["precision=bf16"], ranks=2),
)


@dataclass
class Tally:
    """Counts of one kind. longest: seconds from a kill to the end of the other ranks."""

    kills: int = 0
    while_saving: int = 0
    chains: int = 0
    longest: float = 0.0
    faults: list[str] = field(default_factory=list)


class Campaign:
    """Kills of one kind of run.

    folder: where runs go; corpus: prefix of a token file
    """

    def __init__(self, forks: Forks, kind: Kind, corpus: Path, folder: Path, seed: int) -> None:
        self.forks, self.kind, self.corpus, self.folder = forks, kind, corpus, folder
        self.random = random.Random(seed)
        self.tally = Tally()
        self.folder.mkdir(parents=True)
        self.whole = folder / "whole"
        begin = time.monotonic()
        statuses = [self.forks.wait(pid) for pid in self._start(self.whole)]
        assert statuses == [0] * kind.ranks, self._log(self.whole).read_text()
        self.seconds = time.monotonic() - begin
        self.weights = _weights(self.whole)
        self.losses = _losses(self.whole)
        assert len(self.weights) == STEPS // 2

    def run(self, kills: int) -> Tally:
        """Chains of runs until so many processes or groups have been killed."""
        while self.tally.kills < kills:
            chain = self.folder / f"chain{self.tally.chains}"
            while not self._attempt(chain, kill=self.tally.kills < kills):
                self._check_checkpoints(chain)
            self._check_checkpoints(chain)
            self._check_losses(chain)
            self.tally.chains += 1
            if not self.tally.faults:
                shutil.rmtree(chain)
        return self.tally

    def _attempt(self, chain: Path, *, kill: bool) -> bool:
        """Start or continue a chain, and perhaps kill it; whether it is done."""
        begin = time.time()
        pids = self._start(chain)
        if not self.kind.all_die:
            # One that never comes is waited for (parallel/grid.py, MEETING). A launcher would know.
            self._wait_until_they_have_met(chain, pids, begin)
        if kill and self._reach_a_random_moment(chain, pids):
            self._kill(chain, pids)
            return False
        statuses = [self.forks.wait(pid) for pid in pids]
        if any(statuses):
            log = self._log(chain).read_text()[-2000:]
            self.tally.faults.append(f"{chain}: statuses {statuses}: {log}")
            return True
        return True

    def _wait_until_they_have_met(self, chain: Path, pids: list[int], begin: float) -> None:
        owner = chain / OWNER
        while not (owner.exists() and owner.stat().st_mtime >= begin):
            if any(self.forks.poll(pid) is not None for pid in pids):
                return
            time.sleep(PAUSE)

    def _reach_a_random_moment(self, chain: Path, pids: list[int]) -> bool:
        """Wait for any moment of the run, or of the writing of a checkpoint; whether all run."""
        aims_at_saving = self.random.random() < 0.5
        end = time.monotonic() + self.random.uniform(0, self.seconds)
        while time.monotonic() < end or aims_at_saving:
            if any(self.forks.poll(pid) is not None for pid in pids):
                # It ended before its moment: the attempt counts as one without a kill.
                return False
            if aims_at_saving and time.monotonic() >= end and _is_saving(chain):
                time.sleep(self.random.uniform(0, 0.03))
                break
            time.sleep(PAUSE)
        return True

    def _kill(self, chain: Path, pids: list[int]) -> None:
        saving = _is_saving(chain)
        victims = pids if self.kind.all_die else [self.random.choice(pids)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        others = [pid for pid in pids if pid not in victims]
        for pid in others:
            status = self._ended(pid, begin)
            if status in (None, 0) and not self._is_done(chain):
                self.tally.faults.append(f"{chain}: another rank ended with status {status}")
        for pid in victims:
            self.forks.wait(pid)
        self.tally.longest = max(self.tally.longest, time.monotonic() - begin)
        self.tally.kills += 1
        self.tally.while_saving += saving

    def _ended(self, pid: int, begin: float) -> int | None:
        """The status of a rank whose partner was killed; None where it hung and was killed too."""
        while time.monotonic() - begin < LONGEST:
            status = self.forks.poll(pid)
            if status is not None:
                return status
            time.sleep(PAUSE)
        os.kill(pid, signal.SIGKILL)
        self.forks.wait(pid)
        return None

    def _is_done(self, chain: Path) -> bool:
        return (chain / f"global_step{STEPS}").exists()

    def _check_checkpoints(self, chain: Path) -> None:
        for name, digest in _weights(chain).items():
            if digest != self.weights[name]:
                self.tally.faults.append(f"{chain}/{name}: other weights than undisturbed")

    def _check_losses(self, chain: Path) -> None:
        if _losses(chain) != self.losses:
            self.tally.faults.append(f"{chain}: other losses than undisturbed")
        missing = self.weights.keys() - _weights(chain).keys()
        if missing:
            self.tally.faults.append(f"{chain}: no checkpoints {sorted(missing)}")

    def _start(self, run: Path) -> list[int]:
        words = [*MODEL, *RECIPE, *self.kind.settings]
        words += [f"data_path={self.corpus}", f"save={run}", f"load={run}"]
        micro_batch = 4 // self.kind.ranks
        words.append(f"train_micro_batch_size_per_gpu={micro_batch}")
        return self.forks.start_ranks(self.kind.ranks, "train.py", *words, log=self._log(run))

    def _log(self, run: Path) -> Path:
        return run.with_suffix(".log")


def _is_saving(chain: Path) -> bool:
    return any(chain.glob("partial_step*"))


def _weights(run: Path) -> dict[str, str]:
    """sha256 of the weights of each whole checkpoint, by the folder's name."""
    digests = {}
    for path in run.glob("global_step*/model.safetensors"):
        digests[path.parent.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def _losses(run: Path) -> list[tuple[int, str, float]]:
    """Step, kind and loss of every record."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["kind"], record["loss"]) for record in records]
