"""Which checkpoints of a run stay: the newest ones, and the newest that proved good.

A loss is computed from the weights of the step before. So a checkpoint is good once a loss after
it is no worse than usual. Without this rule a run that explodes would delete its last good weights.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoints.manifest import (
    ENGINE_STATE,
    Damaged,
    engine_files,
    is_verifiable,
    read_record,
    write_record,
)
from megatron.checkpoints.saved import folder_of, remove_checkpoint, steps_in

logger = logging.getLogger(__name__)

EXPLODED = 1.0  # nats above the usual loss: e times the perplexity
FALLS, RISES = 0.5, 0.1  # weight of a lower and of a higher loss in the usual one


class Keeper:
    """Follows a run's losses, and deletes checkpoints that are not needed.

    folder: of the run; None deletes nothing
    count: how many checkpoints stay; None keeps all
    started_at: the step whose checkpoint the run continues; None for a new run
    record: checkpoint.json of that step
    stay: steps whose checkpoints are never deleted and not counted
    """

    def __init__(
        self,
        folder: Path | None,
        count: int | None,
        *,
        started_at: int | None = None,
        record: Mapping[str, Any] | None = None,
        stay: Collection[int] = (),
    ) -> None:
        record = record or {}
        self.folder = folder
        self.count = count
        self.saved = started_at
        self.stay = stay
        self.proven: int | None = record.get("proven")
        self.usual_loss: float | None = record.get("usual_loss")
        if self.usual_loss is None and "vocab" in record:
            self.usual_loss = math.log(record["vocab"])  # that of guessing, which is no explosion
        self.last_loss: float | None = record.get("last_loss")

    def facts(self) -> dict[str, Any]:
        """What the next checkpoint's record must remember."""
        return {
            "proven": self.proven,
            "usual_loss": self.usual_loss,
            "last_loss": self.last_loss,
        }

    def follow(self, losses: Sequence[tuple[int, float]]) -> None:
        """Steps and their finite losses, each once; deletes what a proof made needless."""
        before = self.proven
        for step, loss in losses:
            self._follow_one(step, loss)
        if self.proven != before:
            self.clean()

    def _follow_one(self, step: int, loss: float) -> None:
        usual = self.usual_loss
        last = self.last_loss
        self.last_loss = loss
        if usual is not None and loss > usual + EXPLODED:
            if self.saved == step - 1:
                logger.warning(
                    f"step {step}: loss {loss:.4g} after {usual:.4g}:"
                    f" global_step{self.saved} follows an exploded update,"
                    " the checkpoint before it is kept too"
                )
            return
        self.usual_loss = loss if usual is None else _usual(usual, loss, last)
        if self.saved is not None and self.saved < step:
            self.proven = self.saved

    def wrote(self, step: int) -> None:
        """A checkpoint of this step was written."""
        self.saved = step
        self.clean()

    def clean(self) -> None:
        """Delete all but the newest `count` checkpoints up to the last one written.

        The newest proven one stays, and everything while none is proven.
        """
        if self.folder is None or not self.count or self.saved is None or self.proven is None:
            return
        steps = [step for step in steps_in(self.folder) if step <= self.saved]
        written = [step for step in steps if step not in self.stay]
        kept = {*written[-self.count :], self.proven}
        for step in written:
            if step not in kept:
                self._remove(folder_of(self.folder, step))

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint; one that stays is no reason to end a run."""
        try:
            remove_checkpoint(path)
        except OSError as fault:
            logger.warning("%s: cannot be deleted (%s)", path, fault.strerror)


def _usual(before: float, loss: float, last: float | None) -> float:
    """The usual loss after one more; it follows a fall quickly, so that its bound stays tight.

    last: the loss of the step before. Only two low losses in a row are a fall: after one alone,
    every later loss would look exploded.
    """
    if loss >= before:
        return before + RISES * (loss - before)
    if last is None or last >= before:
        return before
    return before + FALLS * (max(loss, last) - before)


def keep_weights_only(folder: Path) -> None:
    """Delete the engine's state of every checkpoint in a run's folder; evaluation needs none.

    checkpoint.json stops listing the files before they go: whenever this is interrupted, what is
    listed is there. A checkpoint whose record is damaged is left as it is.
    """
    for step in steps_in(folder):
        path = folder_of(folder, step)
        if path.is_symlink():  # it belongs to another run
            continue
        try:
            record = read_record(path)
        except Damaged as damage:
            logger.warning("%s", damage)
            continue
        states = engine_files(path, record)
        if is_verifiable(record) and states:
            files = {name: one for name, one in record["files"].items() if name not in states}
            write_record(path, {**record, "files": files})
        for state in path.glob(ENGINE_STATE):
            state.unlink()
