"""Memory and disk that a training needs at least, held against what the machine has.

Per device, for P learned numbers, N ranks and e bytes of a number (4 in fp32, else 2): weights e P,
gradients e P, Adam's averages 8 P, in bf16 and fp16 float32 masters 4 P. ZeRO 1 divides Adam and
masters by N, 2 also gradients, 3 also weights. Activations come on top and are not foretold.
"""

from typing import NamedTuple

import torch
from psutil import swap_memory

from megatron.config import Config
from megatron.errors import UserError
from megatron.model.size import Parameters, parameters
from megatron.parallel.machine import device_memory, in_bytes

ADAM = 8  # bytes of a number: two float32 averages
FLOAT32 = 4
CHECKPOINT = 12  # bytes of a number in a checkpoint: float32 weights and Adam's two averages
SMALLEST_DEVICE = 2_000_000_000  # bytes; asking a CUDA device takes a second


class TrainingNeeds(NamedTuple):
    """Needs of a training. memory: bytes per device; disk: of checkpoints, at most."""

    parameters: Parameters
    memory: int
    disk: int

    def __str__(self) -> str:
        memory, disk = in_bytes(self.memory), in_bytes(self.disk)
        return f"at least {memory} of memory per device, {disk} of disk for checkpoints"


def needs(config: Config, vocab: int, ranks: int) -> TrainingNeeds:
    """The needs of a training on so many ranks."""
    counts = parameters(config, vocab)
    whole, stage = counts.whole, config.parallel.zero_stage
    number = FLOAT32 if config.precision.dtype == "fp32" else 2
    masters = 0 if config.precision.dtype == "fp32" else FLOAT32
    memory = number * whole // (ranks if stage == 3 else 1)
    memory += number * whole // (ranks if stage >= 2 else 1)
    memory += (ADAM + masters) * whole // (ranks if stage >= 1 else 1)
    interval, most = config.checkpoint.save_interval, config.checkpoint.keep_last_n_checkpoints
    checkpoints = -(-config.training.train_iters // interval) if interval else 1
    if most:
        checkpoints = min(checkpoints, most)
    disk = CHECKPOINT * whole * (checkpoints + 1)
    return TrainingNeeds(counts, memory, disk)


def check_fits(
    config: Config, vocab: int, *, ranks: int, local_ranks: int, device: torch.device
) -> TrainingNeeds:
    """The needs of a training; raises UserError if they are beyond the memory.

    ranks: of the whole run; local_ranks: those on this machine, whose memory they share on the CPU
    """
    need = needs(config, vocab, ranks)
    sharing = local_ranks if device.type == "cpu" else 1
    needed = need.memory * sharing
    if device.type == "cuda" and needed < SMALLEST_DEVICE:
        return need
    memory = device_memory(device)
    if device.type == "cpu":
        memory += swap_memory().total
    if needed > memory:
        model = config.model
        raise UserError(
            f"num_layers = {model.num_layers}, hidden_size = {model.hidden_size}:"
            f" {need.parameters.whole:,} parameters and their optimizer need {in_bytes(needed)}"
            f" or more in {sharing} process(es), and there are {in_bytes(memory)} of memory - lower"
            " them, make_vocab_size_divisible_by or the encoding's options"
        )
    return need
