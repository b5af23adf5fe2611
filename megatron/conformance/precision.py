"""Checks of the numbers that an encoding keeps: in float32, and in checkpoints."""

import copy

import torch

from megatron.conformance.effects import biases, effects_before, longest_length
from megatron.conformance.finding import (
    Finding,
    at_most,
    fails,
    largest_difference_in,
    not_applicable,
)
from megatron.conformance.subject import Subject


@torch.no_grad()
def float32_after_cast(subject: Subject) -> Finding:
    """Casting the model to bfloat16 rounds nothing."""
    position = subject.position()
    cast = copy.deepcopy(position).bfloat16()
    end = longest_length(position)
    before, after = effects_before(position, end), effects_before(cast, end)
    return at_most(0.0, largest_difference_in(before, after))


@torch.no_grad()
def float32_under_autocast(subject: Subject) -> Finding:
    """Autocast to bfloat16 rounds no bias."""
    position = subject.position()
    before = biases(position, 4096)
    if not before:
        return not_applicable("it has no bias")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = biases(position, 4096)
    return at_most(0.0, largest_difference_in(before, after))


@torch.no_grad()
def survives_saving(subject: Subject) -> Finding:
    """Saving and loading changes nothing."""
    saved_one, loaded_one = subject.position(seed=0), subject.position(seed=1)
    saved = saved_one.state_dict()
    learned = dict(saved_one.named_parameters())
    not_learned = sorted(saved.keys() - learned.keys())
    if not_learned:
        names = ", ".join(not_learned)
        return fails(f"{names} is saved and not learned; use persistent=False")
    loaded_one.load_state_dict(saved)
    end = longest_length(saved_one)
    before, after = effects_before(saved_one, end), effects_before(loaded_one, end)
    return at_most(0.0, largest_difference_in(before, after))
