"""A model in the DeepSpeed engine: one optimizer step, one validation, exact numbers of its encoding."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.deepspeed import deepspeed_config
from megatron.errors import UserError
from megatron.model import GPT
from megatron.parallel.grid import Grid
from megatron.positions import Position
from megatron.training.compiled import check_attention, compile_layers
from megatron.training.optimizer import build_optimizer
from megatron.training.schedule import learning_rate

SMALL = 4096  # numbers of one parameter that are kept exact in half precision: kernels, not tables of learned positions


class Trainer:
    """A model in the DeepSpeed engine, and the step it stands at."""

    def __init__(self, config: Config, model: GPT, grid: Grid) -> None:
        if config.precision.dtype == "fp16" and grid.device.type == "cpu":
            raise UserError("precision: fp16 needs a CUDA device - use bf16 or fp32 on the CPU")
        self.config, self.grid = config, grid
        self.step = 0
        model.to(grid.device)
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
        """One optimizer step over gradient_accumulation_steps batches [micro_batch, length + 1]: loss, lr, norm."""
        self.engine.train()
        # The randomness of a step depends on the seed, the step and the rank alone: a resumed run draws the same.
        torch.manual_seed(
            (self.config.training.seed * 1_000_003 + self.step) * self.grid.ranks + self.grid.rank
        )
        lr = learning_rate(self.step, self.config.optimizer)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        total, norm = torch.zeros((), device=self.grid.device), None
        for batch in micro_batches:
            loss = self.losses(batch, mean=True)
            self.engine.backward(loss)
            if (
                self.engine.is_gradient_accumulation_boundary()
                and not self.engine.zero_optimization()
            ):
                norm = _gradient_norm(self.model)
            self.engine.step()
            total += loss.detach() / len(micro_batches)
        self.step += 1
        self.restore_exact_positions()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return {"loss": total, "lr": lr, "grad_norm": norm}

    def losses(self, batch: Tensor, *, mean: bool = False) -> Tensor:
        """Cross entropy of each next token: batch [micro_batch, length + 1] int64 -> [micro_batch, length] float32, or
        their mean, []."""
        ids = batch.to(self.grid.device, non_blocking=True)
        return self.engine(ids[:, :-1], labels=ids[:, 1:], mean=mean)

    @torch.no_grad()
    def validate(self, windows: Iterator[Tensor], count: int) -> float:
        """Mean loss over `count` batches of validation windows [micro_batch, length + 1], over all ranks."""
        self.engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for _ in range(count):
            batch = next(windows)
            # A longer window gets a smaller batch, so that validation never needs more memory than training.
            share = max(1, len(batch) * self.config.model.seq_length // (batch.shape[1] - 1))
            parts = [self.losses(part).double().sum() for part in batch.split(share)]
            total += torch.stack(parts).sum() / (len(batch) * (batch.shape[1] - 1))
        return self.grid.mean(total / count).item()

    def restore_exact_positions(self) -> None:
        """Give the encoding the optimizer's float32 values of its learned numbers, of which the engine holds rounded
        copies in half precision: its tables are then those that a float32 evaluation computes."""
        if self.config.precision.dtype == "fp32":
            return
        from deepspeed.utils import safe_get_full_fp32_param

        positions = cast(Iterable[Position], self.model.positions)
        for module, name, parameter in chain.from_iterable(
            position.own_parameters() for position in positions
        ):
            if _count(parameter) <= SMALL:
                shape = getattr(
                    parameter, "ds_shape", parameter.shape
                )  # ZeRO 3 leaves nothing in its place
                module.exact[name] = (
                    cast(Tensor, safe_get_full_fp32_param(parameter)).detach().view(shape)
                )

    def parameter_counts(self) -> tuple[int, int]:
        """Parameters of the whole model, and of the encoding."""
        modules = (self.model, self.model.positions)
        whole, position = (
            sum(_count(parameter) for parameter in module.parameters()) for module in modules
        )
        return whole, position


def _count(parameter: Tensor) -> int:
    """Numbers of a parameter, also of one that ZeRO 3 has taken apart."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _gradient_norm(model: torch.nn.Module) -> Tensor:
    """The norm of the whole gradient, before clipping."""
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Leave only DeepSpeed's warnings on the console; it also prints memory figures while it builds an engine."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"deepspeed|torch\.distributed"
    )
    with redirect_stdout(StringIO()):
        yield
