"""The least memory that a training run needs.

Per device, for P learned numbers, N ranks and e bytes of a number (4 in fp32, else 2): weights e P,
gradients e P, Adam's averages 8 P, in bf16 and fp16 float32 masters 4 P. ZeRO 1 divides Adam and
masters by N, 2 also gradients, 3 also weights. Activations come on top and are not estimated.
"""

from megatron.config import Config

ADAM = 8  # bytes of a number: two float32 averages
FLOAT32 = 4


def memory_to_train(config: Config, parameters: int, ranks: int) -> int:
    """A lower bound for the bytes on each device."""
    stage = config.parallel.zero_stage
    number, masters = 2, FLOAT32
    if config.precision.dtype == "fp32":
        number, masters = FLOAT32, 0
    memory = number * parameters // (ranks if stage == 3 else 1)
    memory += number * parameters // (ranks if stage >= 2 else 1)
    return memory + (ADAM + masters) * parameters // (ranks if stage >= 1 else 1)
