"""What a training will need of memory and disk, held against what the machine has.

Per device, for P learned numbers, N ranks and e bytes of a number (4 in fp32, else 2):

    state         weights e P, gradients e P, Adam's averages 8 P, in bf16 and fp16 float32 masters
                  4 P; ZeRO 1 divides Adam and masters by N, 2 also gradients, 3 also weights
    activations   e tokens (layers * one + 4 hidden), one = 17 hidden for the papers' GPT; with
                  checkpoint_activations e tokens (layers * hidden + one + 4 hidden)
    head          4 vocab hidden for the gradient of the output matrix, and three blocks of logits

The state is a lower bound, and so are the inputs of the layers, e tokens hidden layers: backward
needs them in any case. What is beyond the memory even so is refused. The rest is an estimate, and
only warns: the peaks of four small fp32 steps on the CPU (292 to 760 MB estimated) were 1.2 to
1.6 times it, most with checkpoint_activations.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoints.saved import leftovers
from megatron.config import Config
from megatron.errors import UserError
from megatron.model import Architecture
from megatron.model.head import tokens_at_once
from megatron.model.size import Parameters, parameters
from megatron.parallel.machine import device_memory, free_disk, in_bytes, total_memory
from megatron.parallel.threads import available_cores

logger = logging.getLogger(__name__)

ADAM = 8  # bytes of a number: two float32 averages
FLOAT32 = 4
CHECKPOINT = 16  # bytes of a number in a checkpoint: float32 weights, the engine's copy, Adam's two
# Numbers that backward needs, per token, layer and feature:
OF_SUMS = 5  # of the residual stream: norms, sums and attention's input
OF_ATTENTION = 4  # of the heads: queries, keys, values and output
OF_MLP = 2  # of the MLP's width: before and after the activation
OF_GATED_MLP = 4  # the same, with the gate and its activation
PROCESS = 500_000_000  # of Python with its packages
INDEX = 4  # bytes of a sample in the index maps, at least
SMALLEST_DEVICE = 2_000_000_000  # bytes; asking a CUDA device takes a second


@dataclass(frozen=True)
class Needs:
    """Of one training. state, inputs, activations: bytes per device; disk: of checkpoints, at most.

    inputs: those of all layers, which are a part of the activations
    """

    parameters: Parameters
    state: int
    inputs: int
    activations: int
    index: int
    disk: int

    @property
    def memory(self) -> int:
        """Bytes per device."""
        return self.state + self.activations

    def __str__(self) -> str:
        memory, disk = in_bytes(self.memory), in_bytes(self.disk)
        return f"about {memory} of memory per device, {disk} of disk for checkpoints"


def needs(config: Config, vocab: int, ranks: int, device: torch.device) -> Needs:
    """What a training on so many ranks of such devices needs."""
    counted = parameters(config, vocab)
    windows = windows_per_step(config) * ranks
    samples = config.training.train_iters * windows
    return Needs(
        counted,
        state=_state(config, counted.whole, ranks),
        inputs=_inputs(config),
        activations=_activations(config, vocab, device),
        index=INDEX * samples,
        disk=CHECKPOINT * counted.whole * (kept_checkpoints(config) + 1),
    )


def windows_per_step(config: Config) -> int:
    """Windows of one rank in an optimizer step."""
    training = config.training
    return training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps


def kept_checkpoints(config: Config) -> int:
    """Checkpoints that a run keeps."""
    interval = config.checkpoint.save_interval
    keep = config.checkpoint.keep_last_n_checkpoints
    written = -(-config.training.train_iters // interval) if interval else 1
    return min(written, keep) if keep else written


def _number(config: Config) -> int:
    """Bytes of a weight or an activation."""
    return FLOAT32 if config.precision.dtype == "fp32" else 2


def _state(config: Config, count: int, ranks: int) -> int:
    """Bytes of weights, gradients and the optimizer on one device."""
    stage = config.parallel.zero_stage
    number = _number(config)
    masters = 0 if config.precision.dtype == "fp32" else FLOAT32
    weights = number * count // (ranks if stage == 3 else 1)
    gradients = number * count // (ranks if stage >= 2 else 1)
    optimizer = (ADAM + masters) * count // (ranks if stage >= 1 else 1)
    return weights + gradients + optimizer


def _tokens(config: Config) -> int:
    """Tokens of one micro batch."""
    return config.training.train_micro_batch_size_per_gpu * config.model.seq_length


def _inputs(config: Config) -> int:
    """Bytes of the layers' inputs for one micro batch."""
    model = config.model
    return _number(config) * _tokens(config) * model.hidden_size * model.num_layers


def _activations(config: Config, vocab: int, device: torch.device) -> int:
    """Bytes of a forward and backward pass of one micro batch."""
    model = Architecture.of(config.model)
    tokens = _tokens(config)
    of_layer = OF_SUMS * model.hidden_size + OF_ATTENTION * model.attention_width
    gated = model.widened > model.mlp_width
    of_layer += (OF_GATED_MLP if gated else OF_MLP) * model.mlp_width
    if config.training.checkpoint_activations:
        of_layers = model.num_layers * model.hidden_size + of_layer
    else:
        of_layers = model.num_layers * of_layer
    numbers = tokens * (of_layers + 4 * model.hidden_size)
    logits = 3 * FLOAT32 * min(tokens, tokens_at_once(device)) * vocab
    return _number(config) * numbers + FLOAT32 * vocab * model.hidden_size + logits


@dataclass(frozen=True)
class Place:
    """Where a training runs. memory: bytes; sharing: how many ranks of this machine share them."""

    memory: int
    sharing: int


def place(need: Needs, device: torch.device, ranks_here: int) -> Place:
    """The memory that counts for a training: the machine's on the CPU, else a device's."""
    if device.type == "cpu":
        return Place(total_memory(), ranks_here)
    if need.memory < SMALLEST_DEVICE:
        return Place(SMALLEST_DEVICE, 1)
    return Place(device_memory(device), 1)


def check_fits(
    config: Config,
    vocab: int,
    *,
    ranks: int,
    ranks_here: int,
    device: torch.device,
    disk: bool = True,
) -> Needs:
    """What a training needs; UserError where it cannot fit.

    ranks: of the whole run; ranks_here: those on this machine, whose memory they share on the CPU
    disk: whether this process asks for the room in `save`
    """
    need = needs(config, vocab, ranks, device)
    where = place(need, device, ranks_here)
    faults = [
        *(_beyond_memory(config, need, where) or _batch_beyond_memory(config, need, where)),
        *_beyond_index(config, need),
        *(_beyond_disk(config, need) if disk else []),
    ]
    if faults:
        raise UserError("\n  ".join(["this machine is too small for the training", *faults]))
    return need


def warn_if_tight(config: Config, need: Needs, *, ranks_here: int, device: torch.device) -> None:
    """Log a warning where memory, disk or cores will hardly suffice."""
    where = place(need, device, ranks_here)
    wanted = (need.memory + PROCESS) * where.sharing
    if wanted > where.memory:
        logger.warning(
            f"memory: about {in_bytes(wanted)} are needed and there are {in_bytes(where.memory)};"
            " if they do not suffice, lower train_micro_batch_size_per_gpu or seq_length,"
            " or set checkpoint_activations: true"
        )
    folder = config.checkpoint.save
    free = free_disk(Path(folder)) if folder else None
    if free is not None and need.disk > free:
        kept = kept_checkpoints(config)
        logger.warning(
            f"save: {kept} checkpoint(s) and the one that is written need about"
            f" {in_bytes(need.disk)}, and {folder} has {in_bytes(free)} free;"
            " set keep_last_n_checkpoints, or raise save_interval"
        )
    workers = config.data.num_workers * ranks_here
    if workers > available_cores():
        logger.warning(
            f"num_workers: {workers} processes would share {available_cores()} core(s);"
            " lower num_workers"
        )


def _beyond_memory(config: Config, need: Needs, where: Place) -> list[str]:
    wanted = need.state * where.sharing
    if wanted <= where.memory:
        return []
    model = config.model
    processes = f" in {where.sharing} processes" if where.sharing > 1 else ""
    return [
        f"num_layers = {model.num_layers}, hidden_size = {model.hidden_size}:"
        f" {need.parameters.whole:,} parameters need {in_bytes(wanted)} for weights, gradients and"
        f" Adam{processes}, and there are {in_bytes(where.memory)} of memory; lower them,"
        " make_vocab_size_divisible_by or the encoding's options"
    ]


def _batch_beyond_memory(config: Config, need: Needs, where: Place) -> list[str]:
    wanted = (need.state + need.inputs) * where.sharing
    if wanted <= where.memory:
        return []
    micro_batch = config.training.train_micro_batch_size_per_gpu
    return [
        f"train_micro_batch_size_per_gpu = {micro_batch}, seq_length = {config.model.seq_length}:"
        f" weights, gradients, Adam and the inputs of the layers alone need"
        f" {in_bytes(wanted)}, and there are {in_bytes(where.memory)} of memory; lower them"
    ]


def _beyond_index(config: Config, need: Needs) -> list[str]:
    memory = total_memory()
    if need.index <= memory:
        return []
    return [
        f"train_iters: {config.training.train_iters} steps need {in_bytes(need.index)} for the"
        f" order of their samples, and there are {in_bytes(memory)} of memory; lower train_iters"
    ]


def _beyond_disk(config: Config, need: Needs) -> list[str]:
    """A fault where not even one checkpoint fits."""
    folder = config.checkpoint.save
    free = _room(Path(folder)) if folder else None
    one = CHECKPOINT * need.parameters.whole
    if free is None or one <= free:
        return []
    return [
        f"save: one checkpoint needs {in_bytes(one)}, and {folder} has {in_bytes(free)} free;"
        " choose another folder, or free some space"
    ]


def _room(folder: Path) -> int | None:
    """Free bytes, with those of what a killed run left there: training removes that first."""
    free = free_disk(folder)
    if free is None:
        return None
    files = (file for leftover in leftovers(folder) for file in leftover.rglob("*"))
    try:
        return free + sum(file.lstat().st_size for file in files)
    except OSError:  # another run is still at work there; its lock is asked later
        return free
