"""What the numbers of an evaluation may be, and what its longest window needs of memory."""

from collections.abc import Mapping, Sequence

import torch

from megatron.errors import UserError
from megatron.model import GPT
from megatron.parallel.machine import device_memory, in_bytes

BOUNDS = {
    "step": (0, 10**12),
    "lengths": (1, 2**24),  # beyond, positions are not exact in float32
    "windows": (1, 10**6),
    "start": (0, 10**12),
    "tail": (1, 2**24),
    "stride": (1, 2**24),
    "sinks": (1, 2**24),
    "clip_distance": (1, 2**24),
    "depths": (1, 1000),
    "trials": (1, 10**6),
    "probe_seed": (0, 2**63 - 1),
    "limit": (1, 10**9),
    "shots": (0, 1000),
}
"""The least and the largest value of each option."""
LONGEST_SHOWN = 40  # characters of a wrong value


def number_fault(option: str, value: int) -> str | None:
    """What is wrong with the value of an option; None: nothing."""
    least, largest = BOUNDS[option]
    if least <= value <= largest:
        return None
    text = str(value)
    if len(text) > LONGEST_SHOWN:
        text = f"{text[:LONGEST_SHOWN]}…"
    return f"{text} is beyond its bounds - give {least} to {largest:,}"


def check_numbers(options: Mapping[str, int | Sequence[int] | None]) -> None:
    """UserError that names every option whose number is out of bounds; None is not given."""
    faults = []
    for option, given in options.items():
        values = [given] if isinstance(given, int) else given or []
        for value in values:
            fault = number_fault(option, value)
            if fault is not None:
                faults.append(f"--{option}: {fault}")
    if faults:
        raise UserError("\n".join(faults))


def check_fits(model: GPT, length: int, device: torch.device) -> None:
    """UserError where one window of so many tokens is certainly too large for the device.

    Counted are the weights, and of one window what exists at the same time in any case: the
    input of a block, its queries, keys and values, and with the eager backend the scores.
    """
    weight = next(model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    hidden = model.word_embeddings.embedding_dim
    window = 4 * length * hidden * weight.element_size()
    if "eager" in model.backends:
        window += 4 * model.position.shape.heads * length**2  # float32
    memory = device_memory(device)
    if weights + window > memory:
        raise UserError(
            f"eval_lengths: one window of {length} tokens needs {in_bytes(window)} beside"
            f" {in_bytes(weights)} of weights, and there are {in_bytes(memory)} of memory"
            " - give shorter lengths"
        )
