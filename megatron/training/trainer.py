"""A model in the DeepSpeed engine: optimizer steps, validations, exact numbers of its encoding."""

import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, cast

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.config import deepspeed_config
from megatron.errors import UserError
from megatron.model import GPT
from megatron.parallel.grid import Grid
from megatron.positions import Position
from megatron.training.compiled import check_attention, compile_layers
from megatron.training.deterministic import check_attention_repeats
from megatron.training.master import master_values, parameter_size
from megatron.training.noise_scale import NoiseScale, own_gradients
from megatron.training.optimizer import build_optimizer
from megatron.training.schedule import learning_rate

SMALL = 4096
"""Numbers of a parameter that is kept exact in half precision: kernels, not learned positions."""
SMALLEST_SCALE = "loss scale already at minimum"
"""In DeepSpeed's message when fp16 gradients overflow at the smallest scale."""


class Trainer:
    """A model in the DeepSpeed engine, and the step it stands at."""

    def __init__(self, config: Config, model: GPT, grid: Grid) -> None:
        if config.precision.dtype == "fp16" and grid.device.type == "cpu":
            raise UserError("precision: fp16 needs a CUDA device - use bf16 or fp32 on the CPU")
        self.config, self.grid = config, grid
        self.step = 0
        self.skips = config.training.skip_nonfinite > 0
        self.noise: NoiseScale | None = None
        """Where the gradients of every step are given to; None: nowhere."""
        model.to(grid.device)
        if config.training.deterministic:
            check_attention_repeats(model)
        if config.training.torch_compile:
            compile_layers(model, grid.device)
        with quiet_deepspeed():
            import deepspeed

            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=build_optimizer(model, config.optimizer, grid.device),
                config=deepspeed_config(config),
                dist_init_required=False,
            )
        self.engine: Any = engine
        self.restore_exact_positions()
        if config.training.torch_compile:
            check_attention(self.model, grid.device)

    @property
    def model(self) -> GPT:
        return cast(GPT, self.engine.module)

    def train_step(self, micro_batches: list[Tensor]) -> dict[str, Any]:
        """One optimizer step over gradient_accumulation_steps batches [micro_batch, length + 1].

        Returns loss, lr, grad_norm, and skipped: whether nothing changed, because the loss or the
        gradient of some rank is not finite and skip_nonfinite allows it. All ranks skip together.
        """
        self.engine.train()
        self._seed_step()
        lr = learning_rate(self.step, self.config.optimizer)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.grid.device)
        norm = None
        for batch in micro_batches:
            loss = self.losses(batch, mean=True)
            total += loss.detach() / len(micro_batches)
            self.engine.backward(_spoiled_if_not_finite(loss) if self.skips else loss)
            last_batch = self.engine.is_gradient_accumulation_boundary()
            if last_batch and not self.engine.zero_optimization():
                norm = _gradient_norm(self.model)
            if last_batch and self.noise is not None:
                self.noise.add(own_gradients(self.model.parameters(), self.grid))
            if last_batch and norm is not None and self.skips and not norm.isfinite():
                self._skip_without_zero()
            else:
                self._engine_step()
        self.step += 1
        self._gather_after_skip()
        self.restore_exact_positions()
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        skipped = self.skips and self._has_skipped(total, norm)
        return {"loss": total, "lr": lr, "grad_norm": norm, "skipped": skipped}

    def _engine_step(self) -> None:
        """DeepSpeed's step; UserError where fp16 has no smaller loss scale."""
        try:
            self.engine.step()
        except Exception as fault:  # DeepSpeed raises no narrower kind
            if SMALLEST_SCALE not in str(fault):
                raise
            raise UserError(
                f"fp16: the gradient at step {self.step + 1} is not finite at the smallest loss"
                " scale - lower optimizer.params.lr, raise warmup, or use precision: bf16"
            ) from None

    def _skip_without_zero(self) -> None:
        """Let the engine count a step in which its optimizer finds no gradients."""
        optimizer = self.engine.optimizer
        groups = optimizer.param_groups
        before = [dict(group) for group in groups]
        # Not earlier: DeepSpeed's clipping needs gradients.
        hook = optimizer.register_step_pre_hook(lambda *_: self.engine.zero_grad())
        self._engine_step()
        hook.remove()
        for group, values in zip(groups, before, strict=True):
            group.update(values)  # apex counts its steps here

    def _gather_after_skip(self) -> None:
        """Make small parameters whole again, as ZeRO 3 itself does only after a step it takes."""
        optimizer = self.engine.optimizer
        small = getattr(optimizer, "persistent_parameters", [])
        if small and optimizer.overflow:
            small[0].all_gather(small)

    def _has_skipped(self, loss: Tensor, norm: Tensor | float | None) -> bool:
        """Whether this step was skipped, for the loss or the gradient and not for the loss scale.

        From ZeRO stage 1 on the engine itself skips a step whose gradient is not finite.
        """
        if not self.engine.zero_optimization():
            assert isinstance(norm, Tensor)
            return not norm.isfinite().item()
        if not self.engine.optimizer.overflow:
            return False
        if self.config.precision.dtype != "fp16":
            return True
        return not self.grid.mean(loss).isfinite().item()

    def _seed_step(self) -> None:
        """Seed this step by configuration, step and rank alone: a resumed run draws the same."""
        step = self.config.training.seed * 1_000_003 + self.step
        torch.manual_seed(step * self.grid.ranks + self.grid.rank)

    def losses(self, batch: Tensor, *, mean: bool = False) -> Tensor:
        """Cross entropy of each next token in float32, or with `mean` their mean, [].

        batch [micro_batch, length + 1] int64 -> [micro_batch, length]
        """
        ids = batch.to(self.grid.device, non_blocking=True)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        if not mean:
            return self.engine(inputs, labels=labels)
        return self.engine(inputs, labels=labels, mean=True, counted=self._counted(inputs))

    def _counted(self, inputs: Tensor) -> Tensor | None:
        """The targets whose loss counts, by their inputs; None for all: [micro_batch, length] bool.

        As in GPT-NeoX and Megatron-LM, eod_mask_loss leaves out what follows the end of a document:
        the first token of the next one. The end itself is learned.
        """
        if not self.config.training.eod_mask_loss:
            return None
        return inputs != self.model.end_of_document

    @torch.no_grad()
    def validate(
        self, windows: Iterator[Tensor], count: int, *, stops: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Mean loss over `count` batches of windows [micro_batch, length + 1], over all ranks.

        stops: asked after each batch; None is returned where it says so
        """
        self.engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for _ in range(count):
            batch = next(windows)
            length = batch.shape[1] - 1
            # A longer window gets a smaller batch: validation needs no more memory than training.
            part_size = max(1, len(batch) * self.config.model.seq_length // length)
            sums = []
            for part in batch.split(part_size):
                losses = self.losses(part).double()
                counted = self._counted(part[:, :-1].to(losses.device))
                sums.append((losses if counted is None else losses * counted).sum())
            counted = self._counted(batch[:, :-1])
            tokens = len(batch) * length if counted is None else max(1, int(counted.sum()))
            total += torch.stack(sums).sum() / tokens
            if stops():
                return None
        return self.grid.mean(total / count).item()

    def restore_exact_positions(self) -> None:
        """Give the encoding the optimizer's float32 values of its learned numbers.

        In half precision the engine holds rounded copies of them. With these values the tables are
        those that an evaluation in float32 computes.
        """
        if self.config.precision.dtype == "fp32":
            return
        places = []
        parameters = []
        for position in cast(Iterable[Position], self.model.positions):
            for module, name, parameter in position.own_parameters():
                if parameter_size(parameter) <= SMALL:
                    places.append((module, name))
                    parameters.append(parameter)
        exact = master_values(parameters, self.grid)
        for (module, name), value in zip(places, exact, strict=True):
            module.exact[name] = value

    def parameter_counts(self) -> tuple[int, int]:
        """Parameters of the whole model, and of the encoding."""
        whole = sum(map(parameter_size, self.model.parameters()))
        position = sum(map(parameter_size, self.model.positions.parameters()))
        return whole, position


def _spoiled_if_not_finite(loss: Tensor) -> Tensor:
    """The same loss; where it is not finite, its gradient is NaN.

    An infinite loss may have finite gradients. A NaN reaches every rank with the gradients, so all
    of them skip without another exchange.
    """
    factor = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    return loss * factor


def _gradient_norm(model: torch.nn.Module) -> Tensor:
    """The norm of the whole gradient, before clipping."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Build an engine without DeepSpeed's reports of memory, which cost time and lines.

    Each report collects garbage, and an engine in half precision makes six: two seconds of a small
    run. So existing objects are set aside meanwhile. Warnings stay.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"deepspeed|torch\.distributed"
    )
    gc.freeze()
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        gc.unfreeze()
