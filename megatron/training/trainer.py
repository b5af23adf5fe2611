"""A model in the DeepSpeed engine: forward, backward, step, and exact values for its encoding."""

import gc
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron.attention import TRUSTED
from megatron.config import Config
from megatron.config.config import deepspeed_config
from megatron.errors import UserError, in_words
from megatron.model import GPT
from megatron.parallel.context import context_of
from megatron.parallel.grid import Grid
from megatron.positions import Position
from megatron.training.optimizer import build_optimizer, learning_rate

SMALL = 4096
"""Largest size of a parameter that is kept exact in half precision: kernels, not learned
positions."""
SMALLEST_SCALE = "loss scale already at minimum"
"""Part of DeepSpeed's message when fp16 gradients overflow at the smallest scale."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Read when CUDA and NCCL start; a value that the user sets is kept."""

logger = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """Numbers of a step. loss: the mean over this rank's micro batches, []

    grad_norm: of the whole gradient before clipping
    """

    loss: Tensor
    lr: float
    grad_norm: Tensor | float | None


class Trainer:
    """A model in the DeepSpeed engine, and its current step."""

    def __init__(self, config: Config, model: GPT, grid: Grid) -> None:
        self.config, self.grid = config, grid
        self.step = 0
        self.context = context_of(grid, config.parallel.cp_comm_type)
        model.context = self.context
        model.to(grid.device)
        if is_compiled(config, grid.device):
            model.compile_layers()
        with quiet_deepspeed():
            import deepspeed

            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=build_optimizer(model, config.optimizer, grid.device),
                config=deepspeed_config(config, grid.ranks),
                dist_init_required=False,
            )
        self.engine: Any = engine
        self.restore_exact_positions()
        if not {choice.backend for choice in self.model.attention_choices} <= TRUSTED:
            # A backend is compared with eager at its first use. Compiled code can't do that, and
            # the backend must not change between a layer's forward pass and its recomputation.
            ids = torch.zeros(1, model.train_length, dtype=torch.long, device=grid.device)
            with torch.compiler.set_stance("force_eager"):
                self.model(ids, labels=ids, mean=True)

    @property
    def model(self) -> GPT:
        return cast(GPT, self.engine.module)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Torch's or apex's optimizer, which ZeRO wraps."""
        outer = self.engine.optimizer
        return getattr(outer, "optimizer", outer)

    def train_step(self, micro_batches: Sequence[Tensor]) -> StepResult:
        """One optimizer step over gradient_accumulation_steps batches [micro_batch, length + 1].

        Its seed depends only on configuration, step and rank, so a resumed run draws the same
        numbers. Raises UserError if the loss scale of fp16 cannot become smaller.
        """
        engine, optimizer, config = self.engine, self.engine.optimizer, self.config
        engine.train()
        seed = config.training.seed * 1_000_003 + self.step
        torch.manual_seed(seed * self.grid.ranks + self.grid.rank)
        lr = learning_rate(self.step, config.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = lr

        total = torch.zeros((), device=self.grid.device)
        for batch in micro_batches:
            loss = self.losses(batch, mean=True)
            total += loss.detach() / len(micro_batches)
            engine.backward(loss)
            if not engine.is_gradient_accumulation_boundary():
                engine.step()

        norm = None  # of the whole gradient before clipping
        if not engine.zero_optimization():
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        try:
            engine.step()
        except Exception as fault:  # DeepSpeed has no narrower exception
            if SMALLEST_SCALE not in str(fault):
                raise
            raise UserError(
                f"fp16: the gradient at step {self.step + 1} is not finite at the smallest loss"
                " scale - lower optimizer.params.lr, raise warmup, or use precision: bf16"
            ) from None
        self.step += 1

        small = getattr(optimizer, "persistent_parameters", [])
        if small and optimizer.overflow:
            small[0].all_gather(small)  # ZeRO 3 only does so after a step that it takes
        self.restore_exact_positions()
        if norm is None:
            norm = engine.get_global_grad_norm()
        return StepResult(total, lr, norm)

    def losses(self, batch: Tensor, *, mean: bool = False) -> Tensor:
        """Cross entropy of each next token in float32, or with `mean` the mean, [].

        batch [micro_batch, length + 1] int64 -> [micro_batch, length]

        If ranks share a text, these are the losses of this rank's part. The mean over ranks of the
        result with `mean` is then the mean over the text.
        """
        batch = batch.to(self.grid.device, non_blocking=True)
        ids, counted = self._split(batch)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        if not mean:
            return self.engine(inputs, labels=labels)
        loss = self.engine(inputs, labels=labels, mean=True, counted=counted)
        if self.context is not None and counted is not None:
            part = counted[:, self.context.part(counted.shape[1])]
            share = part.sum() / counted.sum().clamp(min=1)
            loss = loss * share * self.context.ranks
        return loss

    def _split(self, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        """The ids, and which targets count; None for all.

        batch [micro_batch, length + 1], or of a task [micro_batch, 2, length + 1] with its marks
        -> ids [micro_batch, length + 1], counted [micro_batch, length] bool

        As in GPT-NeoX and Megatron-LM, eod_mask_loss skips the target after the end of a document,
        which is the first token of the next one. The end token itself is learned.
        """
        if batch.dim() == 3:
            ids, marks = batch.unbind(1)
            return ids, marks[:, 1:].bool()
        if not self.config.training.eod_mask_loss:
            return batch, None
        return batch, batch[:, :-1] != self.model.end_of_document

    @torch.no_grad()
    def validate(self, windows: Iterator[Tensor], count: int) -> float:
        """Mean loss over `count` batches of windows [micro_batch, length + 1], over all ranks."""
        self.engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for _ in range(count):
            batch = next(windows)
            length = batch.shape[-1] - 1
            # A longer window gets a smaller batch: validation needs no more memory than training.
            part_size = max(1, len(batch) * self.config.model.seq_length // length)
            losses = torch.cat([self.losses(part) for part in batch.split(part_size)]).double()
            _, counted = self._split(batch.to(losses.device))
            targets = len(batch) * length
            if counted is not None:
                targets = int(counted.sum())
                if self.context is not None:
                    counted = counted[:, self.context.part(length)]
                losses = losses[counted]
            total += losses.sum() * self.grid.context_ranks / max(1, targets)
        return self.grid.mean(total / count).item()

    def restore_exact_positions(self) -> None:
        """Give the encoding the optimizer's float32 values of its learned parameters.

        In half precision the engine holds rounded copies. With the exact values, tables equal those
        of an evaluation in float32.
        """
        if self.config.precision.dtype == "fp32":
            return
        from deepspeed.utils import safe_get_full_fp32_param

        for position in cast(Iterable[Position], self.model.positions):
            for module, name, parameter in position.own_parameters():
                size = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO 3 divides it
                if size <= SMALL and parameter.requires_grad:
                    module.exact[name] = cast(Tensor, safe_get_full_fp32_param(parameter))


def is_compiled(config: Config, device: torch.device) -> bool:
    """Whether to compile the layers (`torch_compile`): a compiler must be installed and work.

    Raises UserError if compilation was requested and no compiler works.
    """
    training, parallel = config.training, config.parallel
    asked = training.torch_compile
    if asked == "auto":
        is_fixed = not training.seq_length_schedule and parallel.context_parallel_size == 1
        asked = device.type == "cuda" and is_fixed and parallel.zero_stage < 3
    if not asked:
        return False
    try:
        # A small test with what a layer needs: a forward and a backward program.
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda x: x.sin().exp().sum())(x).backward()
    except Exception as error:
        fault = f"torch_compile: no compiler works on {device.type}: {in_words(error)}"
        if training.torch_compile is True:
            raise UserError(
                f"{fault} - install g++ (on CUDA also triton), or set torch_compile to false"
            ) from error
        logger.warning("%s; the layers are not compiled", fault)
        return False
    return True


def use_deterministic_algorithms() -> None:
    """`deterministic: true`: runs with the same ranks and hardware are equal; call it before CUDA
    starts.

    On the CPU this is tested. On CUDA we rely on the documentation of torch, cuBLAS and NCCL: torch
    uses deterministic algorithms or raises an error, cuBLAS needs a fixed workspace, and NCCL's
    ring sums in an order that its tuning cannot change.
    """
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Filling new memory helps to find reads of unwritten memory, but costs time in every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Build an engine without DeepSpeed's memory reports, which cost time and fill the log.

    Each report runs the garbage collector, and an engine in half precision makes six: two seconds
    of a small run. So existing objects are frozen meanwhile. Warnings are kept.
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
