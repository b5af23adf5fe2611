"""Checks of what is learned: gradients, bounds, and a hundred steps of training."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.conformance.effects import (
    VERY_FAR,
    effects_before,
    infinite_effect,
    longest_length,
    scores,
)
from megatron.conformance.finding import Finding, at_most, fails, holds, not_applicable
from megatron.conformance.learned import interval
from megatron.conformance.subject import Subject, random_ids
from megatron.errors import UserError
from megatron.model.gpt import GPT
from megatron.positions import Position

LEARNS_NOTHING = "it learns nothing"
DTYPES = (torch.float32, torch.bfloat16)


def gradients_match_finite_differences(subject: Subject) -> Finding:
    """Gradients match finite differences in float64."""
    position = subject.position().double()
    parameters = list(position.parameters())
    if not parameters:
        return not_applicable(LEARNS_NOTHING)
    _move_inside_bounds(position)
    value = _weighted_sum_of_effects(position)
    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    worst = 0.0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            return fails(f"a parameter {list(parameter.shape)} gets no gradient")
        for entry in _chosen_entries(gradient):
            expected = _finite_difference(value, parameter, entry)
            error = abs(expected - float(gradient.flatten()[entry]))
            worst = max(worst, error / max(1.0, abs(expected)))
    return at_most(1e-4, worst, "relative difference")


def _weighted_sum_of_effects(position: Position) -> Callable[[], Tensor]:
    """A function: the sum of embeddings and scores of a random text, with random weights."""
    torch.manual_seed(1)
    shape = position.shape
    length, heads = shape.train_length, shape.heads
    q, k = torch.randn(2, 1, heads, length, shape.head_dim, dtype=torch.float64)
    x = torch.randn(1, length, shape.hidden, dtype=torch.float64)
    score_weights = torch.randn(heads, length, length, dtype=torch.float64)
    x_weights = torch.randn_like(x)

    def value() -> Tensor:
        of_embeddings = (x_weights * position.on_embeddings(x)).sum()
        of_scores = (score_weights * scores(position, q, k, x)).sum()
        return of_embeddings + of_scores

    return value


def _chosen_entries(gradient: Tensor) -> list[int]:
    """All entries of a small parameter; of a large one some, among them the largest gradients."""
    magnitude = gradient.abs().flatten()
    if len(magnitude) <= 128:
        return list(range(len(magnitude)))
    largest = magnitude.topk(6).indices.tolist()
    others = torch.randperm(len(magnitude))[:6].tolist()
    return sorted({*largest, *others})


@torch.no_grad()
def _finite_difference(value: Callable[[], Tensor], parameter: Tensor, entry: int) -> float:
    step = 1e-6
    flat = parameter.view(-1)
    original = flat[entry].clone()
    flat[entry] = original + step
    above = float(value())
    flat[entry] = original - step
    below = float(value())
    flat[entry] = original
    return (above - below) / (2 * step)


@torch.no_grad()
def _move_inside_bounds(position: Position) -> None:
    """Move learned numbers off their bounds: there the value is constant, yet has a gradient."""
    for module in position.modules():
        if isinstance(module, Position):
            for name, (low, high) in module.bounds.items():
                margin = min(1e-3, (high - low) / 4)
                getattr(module, name).clamp_(low + margin, high - margin)


def gradients_finite_far_away(subject: Subject) -> Finding:
    """Gradients are finite at 131072 tokens."""
    position = subject.position()
    named = dict(position.named_parameters())
    if not named:
        return not_applicable(LEARNS_NOTHING)
    end = VERY_FAR
    try:
        effects = effects_before(position, end)
    except UserError:
        end = longest_length(position)
        effects = effects_before(position, end)
    # Relative to its own size, so that a finite number cannot overflow in the sum.
    terms = [(value / value.detach().abs().clamp(min=1)).mean() for value in effects.values()]
    total = torch.stack(terms).sum()
    if not total.requires_grad:
        return fails("nothing that it learns has an effect")
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is not None and not gradient.isfinite().all():
            return fails(f"the gradient of {name} is not finite at {end}")
    return holds("" if end == VERY_FAR else f"at {end}, where it ends")


def gradients_reach_every_parameter(subject: Subject) -> Finding:
    """Gradients reach every parameter of a model.

    At once, or after one step: where a learned factor begins at 0, the other has no gradient yet.
    """
    content = subject.position().has("on_scores")
    backends = ["eager"] if content else ["eager", "sdpa"]
    for backend in backends:
        gpt = subject.gpt(backend).train()
        ids = random_ids(subject.train_length + 1, batch=2)
        optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
        unreached = set(dict(gpt.named_parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            gpt(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
            problem = _problem_with_gradients(gpt)
            if problem:
                return fails(f"{problem} in {backend}")
            unreached &= {name for name, one in gpt.named_parameters() if not _moves(one)}
            if not unreached:
                break
            optimizer.step()
        if unreached:
            name = sorted(unreached)[0]
            return fails(
                f"the gradient of {name} is 0 in {backend} at {subject.train_length} tokens"
            )
    return holds()


def _problem_with_gradients(gpt: GPT) -> str:
    """Which gradient is missing or not finite, or nothing."""
    for name, parameter in gpt.named_parameters():
        if parameter.grad is None:
            return f"{name} gets no gradient"
        if not parameter.grad.isfinite().all():
            return f"the gradient of {name} is not finite"
    return ""


def _moves(parameter: Tensor) -> bool:
    """Whether its gradient is not 0."""
    return parameter.grad is not None and bool(parameter.grad.any())


@torch.no_grad()
def bounds_hold_anywhere(subject: Subject) -> Finding:
    """Learned numbers act within bounds, wherever they drift."""
    if not list(subject.position().parameters()):
        return not_applicable(LEARNS_NOTHING)
    for value in (-5.0, 5.0):
        for dtype in DTYPES:  # DeepSpeed's bf16 engine stores parameters in bfloat16
            position = subject.position()
            for parameter in position.parameters():
                parameter.data = torch.full_like(parameter, value, dtype=dtype)
            problem = _problem_with_learned(position)
            if not problem:
                effects = effects_before(position, longest_length(position))
                problem = infinite_effect(effects)
            if problem:
                return fails(f"{problem} where {value:g} is stored in {_short(dtype)}")
    return holds("stored as -5 and as 5")


def training_stays_finite(subject: Subject) -> Finding:
    """100 training steps leave learned numbers finite and in bounds."""
    if not list(subject.position().parameters()):
        return not_applicable(LEARNS_NOTHING)
    for dtype in DTYPES:
        gpt = subject.gpt(layers=1).train().to(dtype)
        loss = _train(gpt, steps=100)
        if not math.isfinite(loss):
            return fails(f"the loss is {loss} in {_short(dtype)}")
        problem = _problem_with_learned(gpt.position)
        if problem:
            return fails(f"{problem} in {_short(dtype)}")
    return holds()


def _train(gpt: GPT, steps: int) -> float:
    """Train on random texts; the loss of the last step."""
    of_encoding = list(gpt.positions.parameters())
    own = {id(parameter) for parameter in of_encoding}
    others = [parameter for parameter in gpt.parameters() if id(parameter) not in own]
    groups: list[dict[str, object]] = [
        {"params": others},
        {"params": of_encoding, "lr": 3e-2},  # large, so that they meet their bounds
    ]
    optimizer = torch.optim.Adam(groups, lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        ids = random_ids(33, batch=2, seed=step)
        loss = gpt(ids[:, :-1], labels=ids[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _problem_with_learned(position: Position) -> str:
    """What is wrong with the learned numbers as they act, or nothing."""
    learned = position.learned()
    missing = sorted(dict(position.named_parameters()).keys() - learned.keys())
    if missing:
        return f"learned() lacks {', '.join(missing)}"
    for name, value in learned.items():
        if value.dtype != torch.float32:
            return f"{name} is {_short(value.dtype)}"
        low, high = interval(position, name, "bounds")
        outside = (value < low) | (value > high) | ~value.isfinite()
        if outside.any():
            return f"{name} is {float(value[outside][0]):g}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
