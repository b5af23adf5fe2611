"""What every encoding must keep, tried on one of them: the checks behind tools/check_encoding.py.

Each check takes a Subject and returns a Finding. An encoding without the hook that a check is about gets "n/a".
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.conformance.subject import (
    FAR,
    VOCAB,
    Subject,
    adds_to_embeddings,
    far_effects,
    reach,
    scores,
    tables,
)
from megatron.errors import UserError
from megatron.model.gpt import Cache
from megatron.positions import DistanceBias, Position

HOLDS, FAILS, FACT, NOT_APPLICABLE = "ok", "FAIL", "no", "n/a"


@dataclass(frozen=True)
class Finding:
    """verdict: ok, FAIL, "no" for a fact that is no fault, n/a; detail: the numbers, or why."""

    check: str
    verdict: str
    detail: str = ""


Check = Callable[[Subject], Finding]


def examine(subject: Subject, checks: Sequence[Check] | None = None) -> list[Finding]:
    """Every check in order; what an encoding raises is a failure of that check, and the others go on."""
    subject.position()  # a wrong name or option is the user's fault and stops here
    return [_tried(check, subject) for check in checks or CHECKS]


def _tried(check: Check, subject: Subject) -> Finding:
    try:
        found = check(subject)
        return replace(found, check=_title(check))
    except UserError as refusal:
        return Finding(_title(check), NOT_APPLICABLE, f"refused: {refusal}")
    except Exception as fault:
        return Finding(_title(check), FAILS, f"{type(fault).__name__}: {fault}")


def _title(check: Check) -> str:
    return (check.__doc__ or "").split("\n")[0].rstrip(".")


def _found(worst: float, bound: float, what: str = "largest difference") -> Finding:
    if worst <= bound:
        return Finding("", HOLDS, f"{what} {worst:.1e}")
    return Finding("", FAILS, f"{what} {worst:.1e}, allowed {bound:g}")


def _absent(why: str) -> Finding:
    return Finding("", NOT_APPLICABLE, why)


def _largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    differences = (
        (a.detach().double() - b.detach().double()).abs().nan_to_num(math.inf)
        for a, b in zip(first, second, strict=True)
    )
    return max((float(difference.max()) for difference in differences), default=0.0)


def _ids(length: int, batch: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def _looks_at_content(subject: Subject) -> bool:
    return subject.position().has("on_scores")


def right_shape(subject: Subject) -> Finding:
    """Tables are [heads, length] float32 for 1 to 32 heads."""
    for heads in (1, 3, 12, 16, 32):
        found = tables(replace(subject, heads=heads).position(), 40)
        for name, table in found.items():
            if tuple(table.shape) != (heads, 40) or table.dtype != torch.float32:
                return Finding(
                    "", FAILS, f"{name} with {heads} heads is {list(table.shape)} {table.dtype}"
                )
    have = tables(subject.position(), 8)
    return Finding("", HOLDS, ", ".join(have)) if have else _absent("it has no table by distance")


def zero_at_zero(subject: Subject) -> Finding:
    """The bias is 0 at distance 0."""
    bias = tables(subject.position(), 1).get("bias")
    if bias is None:
        return _absent("it has no bias by distance")
    worst = float(bias.detach().abs().max())
    return Finding(
        "",
        HOLDS if worst <= 1e-6 else _unless_claimed(subject, "zero_at_0"),
        f"largest {worst:.1e}",
    )


def never_rises(subject: Subject) -> Finding:
    """The bias never rises with distance."""
    bias = tables(subject.position(), FAR[0]).get("bias")
    if bias is None:
        return _absent("it has no bias by distance")
    bias = bias.detach()
    rise = bias.diff().clamp(min=0)
    # float32 rounds neighbours of a large, slowly falling number in either direction
    slack = 4 * torch.finfo(torch.float32).eps * bias[:, 1:].abs()
    rising = (rise > slack).nonzero()
    if not len(rising):
        return Finding("", HOLDS, f"on 0 to {FAR[0] - 1}")
    head, distance = rising[0].tolist()
    detail = f"head {head} rises by {rise[head, distance]:.1e} from distance {distance}"
    return Finding("", _unless_claimed(subject, "never_rises"), detail)


def _unless_claimed(subject: Subject, claim: str) -> str:
    return FAILS if claim in subject.position().claims else FACT


@torch.no_grad()
def shift_invariant(subject: Subject) -> Finding:
    """Scores depend on the distance alone."""
    position = subject.position()
    if position.has("on_scores"):
        return Finding("", FACT, "it looks at content")
    if adds_to_embeddings(position):
        return Finding("", FACT, "it adds something to the embedding")
    position = position.double()
    torch.manual_seed(1)
    one = torch.randn(2, 1, subject.heads, 1, subject.head_dim, dtype=torch.float64)
    q, k = one.expand(2, 1, subject.heads, 50, subject.head_dim)
    near, far = scores(position, q, k), scores(position, q, k, start=16000)
    size = max(1.0, float(near.abs().max()))
    diagonal = (near[:, 1:, 1:] - near[:, :-1, :-1]).tril()
    worst = max(float((near - far).abs().max()), float(diagonal.abs().max())) / size
    found = _found(worst, 1e-6, "relative difference")
    return (
        replace(found, verdict=FACT)
        if found.verdict == FAILS and position.has("index_bias")
        else found
    )


def finite_far_away(subject: Subject) -> Finding:
    """Everything is finite at 16384 and at 131072 tokens."""
    position, refusal = subject.position(), ""
    for far in FAR:
        try:
            effects = far_effects(position, far)
        except UserError as fault:
            if far == FAR[0]:
                raise
            refusal = f"at {FAR[0]}; at {far} refused: {fault}"
            break
        if not all(bool(tensor.isfinite().all()) for tensor in effects):
            return Finding("", FAILS, f"not finite at {far}")
    return Finding("", HOLDS, refusal)


def no_memory_of_lengths(subject: Subject) -> Finding:
    """Lengths 512, 16384, 64 after each other agree."""
    position = subject.position()
    longest = tables(position, FAR[0])
    if not longest:
        return _absent("it has no table by distance")
    worst = 0.0
    for length in (512, FAR[0], 64):
        for name, table in tables(position, length).items():
            worst = max(worst, _largest_difference([table], [longest[name][:, :length]]))
    return _found(worst, 0.0)


def float32_after_cast(subject: Subject) -> Finding:
    """Casting the model to bfloat16 rounds nothing."""
    position = subject.position()
    cast, far = copy.deepcopy(position).bfloat16(), reach(position)
    return _found(_largest_difference(far_effects(position, far), far_effects(cast, far)), 0.0)


def float32_under_autocast(subject: Subject) -> Finding:
    """Autocast to bfloat16 rounds no table."""
    position = subject.position()
    before = list(tables(position, 4096).values())
    if not before:
        return _absent("it has no table by distance")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = list(tables(position, 4096).values())
    return _found(_largest_difference(before, after), 0.0)


@torch.no_grad()
def prefix_consistent(subject: Subject) -> Finding:
    """The first tokens do not notice what follows."""
    gpt = subject.gpt()
    ids = _ids(min(reach(gpt.position), 1024 if _looks_at_content(subject) else 4096))
    first = ids.shape[1] // 8
    return _found(_largest_difference([gpt(ids)[:, :first]], [gpt(ids[:, :first])]), 1e-4)


@torch.no_grad()
def cached_is_full(subject: Subject) -> Finding:
    """Decoding with a cache is the full forward pass."""
    gpt, ids = subject.gpt(), _ids(3 * subject.train_length // 4, batch=2)
    whole, worst = gpt(ids), 0.0
    for piece in (1, 7):
        cache = Cache()
        parts = [gpt(part, cache=cache) for part in ids.split(piece, dim=1)]
        worst = max(worst, _largest_difference([torch.cat(parts, dim=1)], [whole]))
    return _found(worst, 1e-4)


def backends_agree(subject: Subject) -> Finding:
    """eager = sdpa, forward and backward."""
    if _looks_at_content(subject):
        return _absent("scores that look at content exist in eager only")
    ids, found = _ids(min(reach(subject.position()), 300) + 1, batch=2), []
    for backend in ("eager", "sdpa"):
        gpt = subject.gpt(backend)
        loss = gpt(ids[:, :-1], labels=ids[:, 1:])
        loss.mean().backward()
        # a norm's or bias's gradient may be tiny: compare with the largest of all
        found.append([loss.detach(), *(p.grad for p in gpt.parameters() if p.grad is not None)])
    return _found(_largest_difference(*found), 1e-4)


@torch.no_grad()
def finite_losses(subject: Subject) -> Finding:
    """Losses are finite at 16384, in float32 and bfloat16."""
    length = 2048 if _looks_at_content(subject) else FAR[0]
    ids = _ids(length + 1)
    for dtype in (torch.float32, torch.bfloat16):
        gpt = subject.gpt(layers=1).to(dtype)
        if not gpt(ids[:, :-1], labels=ids[:, 1:]).isfinite().all():
            return Finding("", FAILS, f"not finite in {dtype}")
    return Finding(
        "", HOLDS, "" if length == FAR[0] else f"at {length}: content needs memory for length²"
    )


def gradients_are_slopes(subject: Subject) -> Finding:
    """Gradients equal finite differences in float64."""
    position = subject.position().double()
    parameters = list(position.parameters())
    if not parameters:
        return _absent("it learns nothing")
    _step_inside(position)
    torch.manual_seed(1)
    length = subject.train_length
    q, k = torch.randn(2, 1, subject.heads, length, subject.head_dim, dtype=torch.float64)
    x = torch.randn(1, length, subject.heads * subject.head_dim, dtype=torch.float64)
    weigh_scores, weigh_x = torch.randn(subject.heads, length, length).double(), torch.randn_like(x)

    def value() -> Tensor:
        embedded = (weigh_x * position.on_embeddings(x)).sum()
        return embedded + (weigh_scores * scores(position, q, k, x)).sum()

    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    worst = 0.0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            return Finding("", FAILS, f"a parameter {list(parameter.shape)} gets no gradient")
        entries = torch.randperm(parameter.numel())[:6].tolist()
        for entry in entries:
            slope = _slope(value, parameter, entry)
            worst = max(worst, abs(slope - float(gradient.flatten()[entry])) / max(1.0, abs(slope)))
    return _found(worst, 1e-4, "relative difference")


@torch.no_grad()
def _slope(value: Callable[[], Tensor], parameter: Tensor, entry: int, step: float = 1e-6) -> float:
    flat, ends = parameter.view(-1), []
    kept = flat[entry].clone()
    for sign in (1, -1):
        flat[entry] = kept + sign * step
        ends.append(float(value()))
    flat[entry] = kept
    return (ends[0] - ends[1]) / (2 * step)


@torch.no_grad()
def _step_inside(position: Position) -> None:
    """Move every learned number off its bounds, where the gradient passes but the value stands still."""
    for module in position.modules():
        if isinstance(module, Position):
            for name, (low, high) in module.bounds.items():
                parameter = getattr(module, name)
                room = min(1e-3, (high - low) / 4)
                parameter.clamp_(low + room, high - room)


def survives_saving(subject: Subject) -> Finding:
    """Saving and loading changes nothing."""
    first, second = subject.position(seed=0), subject.position(seed=1)
    saved = first.state_dict()
    extra = saved.keys() - dict(first.named_parameters()).keys()
    if extra:
        return Finding(
            "", FAILS, f"{', '.join(sorted(extra))} is saved and not learned; use persistent=False"
        )
    second.load_state_dict(saved)
    near = 32  # within reach of encodings that end somewhere
    return _found(_largest_difference(far_effects(first, near), far_effects(second, near)), 0.0)


def bounds_hold(subject: Subject) -> Finding:
    """100 optimizer steps leave all finite and within bounds."""
    for dtype in (torch.float32, torch.bfloat16):
        gpt = subject.gpt().train().to(dtype)
        own = {id(parameter) for parameter in gpt.positions.parameters()}
        others = [parameter for parameter in gpt.parameters() if id(parameter) not in own]
        groups = [
            {"params": others},
            *([{"params": list(gpt.positions.parameters()), "lr": 3e-2}] if own else []),
        ]
        optimizer = torch.optim.Adam(groups, lr=3e-3)
        for step in range(100):
            ids = torch.randint(VOCAB, (2, 33), generator=torch.Generator().manual_seed(step))
            loss = gpt(ids[:, :-1], labels=ids[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not loss.isfinite():
            return Finding("", FAILS, f"the loss is {float(loss)} in {dtype}")
        for position in gpt.positions:
            assert isinstance(position, Position)
            wrong = _out_of_bounds(position)
            if wrong:
                return Finding("", FAILS, f"{wrong} in {dtype}")
    return Finding("", HOLDS)


def _out_of_bounds(position: Position) -> str:
    """The learned number that is not finite, not float32 or outside its bounds, or nothing."""
    for name, value in position.learned().items():
        owner, _, last = name.rpartition(".")
        module = position.get_submodule(owner)
        low, high = getattr(module, "bounds", {}).get(last, (-math.inf, math.inf))
        if (
            value.dtype != torch.float32
            or not value.isfinite().all()
            or value.min() < low
            or value.max() > high
        ):
            return f"{name} is {value.dtype} from {float(value.min()):g} to {float(value.max()):g}"
    return ""


def alone_in_a_mixture(subject: Subject) -> Finding:
    """Alone in a mixture it is itself."""
    position = subject.position()
    if not isinstance(position, DistanceBias):
        return _absent("it is not a function of the distance alone")
    mixed = replace(
        subject, name="mep", options={"kernels": [{subject.name: subject.options}]}
    ).position()
    return _found(
        _largest_difference([*tables(position, 512).values()][:1], [*tables(mixed, 512).values()]),
        1e-5,
    )


CHECKS: tuple[Check, ...] = (
    right_shape,
    shift_invariant,
    zero_at_zero,
    never_rises,
    finite_far_away,
    no_memory_of_lengths,
    float32_after_cast,
    float32_under_autocast,
    prefix_consistent,
    cached_is_full,
    backends_agree,
    finite_losses,
    gradients_are_slopes,
    survives_saving,
    bounds_hold,
    alone_in_a_mixture,
)
