"""The losses since the last log line: their mean, and what happens where one is not finite."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config import Config
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.training.metrics import Metrics
from megatron.training.text import Text, listed

logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """number: how many steps there are with it; used: windows of all ranks before it;
    numbers: loss of this rank and norm of the gradient, [2] float32
    """

    number: int
    used: int
    numbers: Tensor


class Watch:
    """Losses since the last log line. Every rank calls each method at the same step.

    pending: mean losses that a checkpoint holds because they were not logged yet
    skipped: steps that were skipped before the checkpoint
    metrics: where skipped steps are recorded; None on other ranks than the first
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        text: Text,
        metrics: Metrics | None = None,
        *,
        pending: Sequence[float] = (),
        skipped: int = 0,
    ) -> None:
        self.config, self.grid, self.text, self.metrics = config, grid, text, metrics
        self.losses = [torch.tensor(loss, device=grid.device) for loss in pending]
        self.unchecked: list[Step] = []
        self.skipped = skipped

    def add(self, number: int, used: int, result: dict[str, Any]) -> None:
        """One step, with what `Trainer.train_step` returned.

        UserError where more steps were skipped than skip_nonfinite allows.
        """
        norm = result["grad_norm"]
        if norm is None or self.config.precision.dtype == "fp16":
            norm = 0.0  # in fp16 a loss scale that is too large is no fault of the step
        if not isinstance(norm, Tensor):
            # Filled on the device: a copy from the host would wait for it.
            norm = torch.full((), norm, device=self.grid.device)
        step = Step(number, used, torch.stack([result["loss"].float(), norm.float()]))
        if result["skipped"]:
            self._skip(step)
        else:
            self.unchecked.append(step)

    def check(self) -> list[tuple[int, float]]:
        """Steps since the last check with their mean losses over all ranks.

        UserError where a loss or a norm of any rank is not finite. Only here the ranks wait for
        each other, and the host for the device.
        """
        if not self.unchecked:
            return []
        own = torch.stack([step.numbers for step in self.unchecked])
        means = self.grid.mean(own)  # [steps, 2]
        finite = means.isfinite().all(dim=1).tolist()
        if not all(finite):
            step = self.unchecked[finite.index(False)]
            what, batch = self._describe(step)
            raise UserError(f"{what} - {self._cure()}, or set skip_nonfinite\n  {batch}")
        self.losses += list(means[:, 0])
        numbers = [step.number for step in self.unchecked]
        self.unchecked.clear()
        return list(zip(numbers, means[:, 0].tolist(), strict=True))

    def take_mean(self) -> float:
        """The mean of the checked losses, which are then forgotten; NaN where there are none."""
        assert not self.unchecked
        if not self.losses:
            return math.nan
        mean = torch.stack(self.losses).mean().item()
        self.losses.clear()
        return mean

    def pending(self) -> list[float]:
        """Checked losses that were not logged yet."""
        assert not self.unchecked
        return [loss.item() for loss in self.losses]

    def _skip(self, step: Step) -> None:
        """Count, log and record a step that changed nothing."""
        self.skipped += 1
        what, batch = self._describe(step)
        allowed = self.config.training.skip_nonfinite
        if self.skipped > allowed:
            raise UserError(
                f"{what}, and {allowed} steps were skipped before it (skip_nonfinite: {allowed})"
                f" - {self._cure()}\n  {batch}"
            )
        logger.warning("%s: skipped, %d of %d\n  %s", what, self.skipped, allowed, batch)
        if self.metrics is None:
            return
        loss, norm = step.numbers.tolist()
        numbers = {"loss": loss, "grad_norm": norm, "skipped": self.skipped}
        ranks = []
        for rank in range(self.grid.ranks):
            windows = self.text.windows_of(step.used, rank)
            documents = self.text.documents_of(windows)
            ranks.append({"rank": rank, "samples": windows, "documents": documents})
        self.metrics.log(step.number, "skipped", numbers, details={"batch": ranks})

    def _describe(self, step: Step) -> tuple[str, str]:
        """What is not finite, and the batch of the ranks whose own loss it is, else of all."""
        numbers = self.grid.gather(step.numbers.tolist())  # [[loss, norm]] by rank
        losses = [loss for loss, _ in numbers]
        norm = numbers[0][1]
        bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad_ranks:
            what = f"loss: {losses[bad_ranks[0]]} at step {step.number}"
        else:
            what = f"gradient norm: {norm} at step {step.number}"
        batches = []
        for rank in bad_ranks or range(self.grid.ranks):
            windows = self.text.windows_of(step.used, rank)
            documents = self.text.documents_of(windows)
            batches.append(
                f"rank {rank} had samples {listed(windows)} of documents {listed(documents)}"
            )
        return what, "\n  ".join(batches)

    def _cure(self) -> str:
        cure = "lower optimizer.params.lr, raise warmup"
        return cure if self.config.precision.dtype == "fp32" else f"{cure}, use precision: fp32"
