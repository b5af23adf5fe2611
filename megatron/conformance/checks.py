"""What every encoding must keep: its tables, its numbers, its place in a model, its gradients."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from megatron.cli_errors import explained
from megatron.conformance.subject import (
    FACT,
    FAILS,
    FAR,
    HOLDS,
    NOT_APPLICABLE,
    VERY_FAR,
    Finding,
    Subject,
    at_most,
    biases,
    effects_before,
    infinite_effect,
    largest_difference,
    largest_difference_in,
    longest_length,
    random_ids,
    scores,
)
from megatron.errors import UserError
from megatron.model.cache import Cache
from megatron.positions import Position
from megatron.positions.base import WrongEncoding
from megatron.positions.precision import UNBOUNDED

NO_BIAS = Finding(NOT_APPLICABLE, "it has no bias by distance")
LEARNS_NOTHING = Finding(NOT_APPLICABLE, "it learns nothing")
TOO_FAR = Finding(NOT_APPLICABLE, "it looks at content, which was computed on 32 tokens alone")
SIZES = (32, 256)  # tokens
ROUNDING = 1e-11  # of the largest entry, for each token


def examine(subject: Any, checks: Sequence[Callable[[Any], Finding]]) -> list[Finding]:
    """Try the checks in order, and go on after one that fails or raises.

    A hook that returns something of another shape ends the examination. Raises what the user's own
    file raises, and for a lack of memory.
    """
    findings = []
    for check in checks:
        try:
            finding = check(subject)
        except WrongEncoding as wrong:  # others would only say the same
            return [*findings, Finding(FAILS, str(wrong), title(check))]
        except UserError as refusal:
            finding = Finding(NOT_APPLICABLE, f"refused: {refusal}")
        except Exception as fault:
            if explained(fault):
                raise
            finding = Finding(FAILS, f"{type(fault).__name__}: {fault}")
        findings.append(replace(finding, check=title(check)))
    return findings


def title(check: Callable[[Any], Finding]) -> str:
    """The sentence that a check tries: the first line of its docstring."""
    first_line = (check.__doc__ or "").split("\n")[0]
    return first_line.rstrip(".")


@torch.no_grad()
def right_shape(subject: Subject) -> Finding:
    """Biases are [heads, length] float32 for 1 to 32 heads."""
    names = ", ".join(biases(subject.position(), 8))
    if not names:
        return Finding(NOT_APPLICABLE, "it has no bias")
    for heads in (1, 3, 12, 16, 32, subject.heads):
        try:
            position = replace(subject, heads=heads).position()
        except UserError:  # its options hold one number per head
            continue
        for name, bias in biases(position, 40).items():
            if bias.shape != (heads, 40) or bias.dtype != torch.float32:
                shape = list(bias.shape)
                return Finding(FAILS, f"{name} with {heads} heads is {shape} {bias.dtype}")
    return Finding(HOLDS, names)


@torch.no_grad()
def shift_invariant(subject: Subject) -> Finding:
    """Scores depend on the distance alone."""
    position = subject.position()
    if position.looks_at_content:
        return Finding(FACT, "it looks at content")
    if position.on_embeddings(torch.zeros(1, 8, position.shape.hidden)).any():
        return Finding(FACT, "it adds something to the embedding")
    if not position.by_distance:
        return Finding(FACT, "it says that it depends on the place in the text")
    position = position.double()
    torch.manual_seed(1)
    # The same query, and the same key, at every position.
    one_of_each = torch.randn(2, 1, subject.heads, 1, subject.head_dim, dtype=torch.float64)
    q, k = one_of_each.expand(-1, -1, -1, 50, -1)
    if position.only_rotates:
        norms = position.on_queries_keys(q, k)[1].norm(dim=-1)
        if norms.std(dim=-1).max() > 1e-9:
            return Finding(FAILS, "it says only_rotates, and norms change along the text")
    near = scores(position, q, k)
    far = scores(position, q, k, start=16000)
    moved = near[..., 1:, 1:].tril()  # one position further along the diagonals
    worst = max(largest_difference(near, far), largest_difference(moved, near[..., :-1, :-1]))
    size = max(1.0, float(near.abs().max()))
    finding = at_most(1e-9, worst / size, "relative difference")
    if finding.verdict == FAILS and position.has("index_bias"):
        return replace(finding, verdict=FACT)
    return finding


@torch.no_grad()
def zero_at_zero(subject: Subject) -> Finding:
    """The bias is 0 at distance 0."""
    position = subject.position()
    bias = position.distance_bias(1)
    if bias is None:
        return NO_BIAS
    largest = float(bias.abs().max())
    detail = f"largest {largest:.1e}"
    if largest <= 1e-6:
        return Finding(HOLDS, detail)
    return Finding(FAILS if "zero_at_0" in position.claims else FACT, detail)


@torch.no_grad()
def never_rises(subject: Subject) -> Finding:
    """The bias never rises with distance."""
    position = subject.position()
    bias = position.distance_bias(FAR)
    if bias is None:
        return NO_BIAS
    rise = bias.diff().clamp(min=0)
    # float32 rounds neighbours of a large, slowly falling number in either direction
    rounding = 4 * torch.finfo(torch.float32).eps * bias[:, 1:].abs()
    rising = (rise > rounding).nonzero()
    if not len(rising):
        return Finding(HOLDS, f"on 0 to {FAR - 1}")
    head, distance = rising[0].tolist()
    detail = f"head {head} rises by {rise[head, distance]:.1e} from distance {distance}"
    return Finding(FAILS if "never_rises" in position.claims else FACT, detail)


@torch.no_grad()
def conditionally_positive_definite(subject: Subject) -> Finding:
    """The bias is a conditionally positive definite kernel of the distance.

    KERPLE (arXiv 2205.09921) takes biases k(i - j) of which Σ_ij c_i c_j k(i - j) ≥ 0 for all c
    whose sum is 0. Then k plus a large enough constant is positive definite, and softmax does not
    see the constant. MEP (arXiv 2403.17698) takes positive definite kernels exp(bias) and their
    means. That is the weaker property: a bias is conditionally positive definite if and only if
    exp(t · bias) is positive definite for all t > 0 (Schoenberg). A matrix of a few hundred tokens
    can refute a property. It cannot prove it for longer texts.
    """
    position = subject.position()
    bias = copy.deepcopy(position).double().distance_bias(SIZES[-1])
    if bias is None:
        return NO_BIAS
    if not bias.isfinite().all():
        return Finding(FAILS, "the bias is not finite")
    smallest = smallest_eigenvalues(bias, sum_is_zero=True)
    negative = smallest < 0
    if not negative.any():
        return Finding(HOLDS, f"on {' and '.join(map(str, SIZES))} tokens")
    value = float(smallest.min())
    size, head = divmod(int(smallest.argmin()), len(bias))
    detail = f"head {head} has the eigenvalue {value:.1e} on {SIZES[size]} tokens"
    if not (smallest_eigenvalues(bias.exp()) < 0).any():
        detail += "; exp(bias) is positive definite, as MEP's kernels are"
    must = "conditionally_positive_definite" in position.claims
    return Finding(FAILS if must else FACT, detail)


def smallest_eigenvalues(kernel: Tensor, *, sum_is_zero: bool = False) -> Tensor:
    """The smallest eigenvalue of the matrices kernel[|i - j|], relative to their largest entry.

    kernel [heads, at least the largest size] float64 -> [sizes, heads], 0 if rounding explains it;
    sum_is_zero: only for vectors whose sum is 0
    """
    smallest = []
    for tokens in SIZES:
        index = torch.arange(tokens)
        matrices = kernel[:, (index[:, None] - index).abs()]  # [heads, tokens, tokens]
        scale = matrices.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(matrices.dtype).tiny)
        if sum_is_zero:
            matrices = matrices - matrices.mean(dim=1, keepdim=True)
            matrices = matrices - matrices.mean(dim=2, keepdim=True)
        eigenvalue = torch.linalg.eigvalsh(matrices)[:, 0] / scale
        smallest.append(torch.where(eigenvalue < -ROUNDING * tokens, eigenvalue, 0.0))
    return torch.stack(smallest)


@torch.no_grad()
def finite_far_away(subject: Subject) -> Finding:
    """Everything is finite at 16384 and at 131072 tokens."""
    position = subject.position()
    detail = ""
    for end in (FAR, VERY_FAR):
        try:
            effects = effects_before(position, end)
        except UserError as refusal:
            if end == FAR:
                raise
            detail = f"at {FAR}; at {VERY_FAR} refused: {refusal}"
            continue
        if problem := infinite_effect(effects):
            return Finding(FAILS, f"{problem} at {end}")
    return TOO_FAR if position.looks_at_content else Finding(HOLDS, detail)


@torch.no_grad()
def float32_in_half_precision(subject: Subject) -> Finding:
    """Casting the model to bfloat16 rounds nothing, and autocast no bias."""
    position = subject.position()
    exact = biases(position, 4096)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        worst = largest_difference_in(exact, biases(position, 4096))
    if worst:
        return at_most(0.0, worst)
    return same_effects(position, copy.deepcopy(position).bfloat16())


def same_effects(first: Position, second: Position) -> Finding:
    """Whether two encodings do the same, bit for bit."""
    end = longest_length(first)
    return at_most(
        0.0, largest_difference_in(effects_before(first, end), effects_before(second, end))
    )


@torch.no_grad()
def survives_saving(subject: Subject) -> Finding:
    """Saving and loading changes nothing."""
    saved_one = subject.position(seed=0)
    loaded_one = subject.position(seed=1)
    loaded_one.load_state_dict(saved_one.state_dict())
    return same_effects(saved_one, loaded_one)


@torch.no_grad()
def later_tokens_change_nothing(subject: Subject) -> Finding:
    """Later tokens do not change the logits of earlier ones."""
    gpt = subject.gpt()
    ids = random_ids(min(longest_length(gpt.position), 1200))  # attention has blocks of 1024
    first = min(512, ids.shape[1] // 2)
    whole, alone = gpt(ids)[:, :first], gpt(ids[:, :first])
    return at_most(1e-4, largest_difference(whole, alone))


@torch.no_grad()
def cached_is_full(subject: Subject) -> Finding:
    """Decoding with a cache gives the logits of the full pass."""
    gpt = subject.gpt()
    ids = random_ids(3 * subject.train_length // 4, batch=2)
    whole = gpt(ids)
    last = ids.shape[1] // 4
    one_by_one = [ids.shape[1] - last, *[1] * last]
    worst = 0.0
    for pieces in (one_by_one, 7):
        cache = Cache()
        logits = [gpt(piece, cache=cache) for piece in ids.split(pieces, dim=1)]
        worst = max(worst, largest_difference(torch.cat(logits, dim=1), whole))
    return at_most(1e-4, worst)


@torch.no_grad()
def parts_sum_to_the_whole(subject: Subject) -> Finding:
    """Sums of the parts of a text give the bias by content of the whole.

    So processes that have a part each exchange the last sums alone (`context_parallel_size`).
    """
    position = subject.position().double()
    if not position.has("score_bias"):
        return Finding(NOT_APPLICABLE, "it has no score_bias")
    position.check_parts()
    torch.manual_seed(1)
    x = torch.randn(2, subject.train_length, position.shape.hidden, dtype=torch.float64)
    whole = position.score_bias(x, {})
    parts = [position.score_bias(part, {}) for part in x.split(subject.train_length // 3, dim=1)]
    total = torch.zeros(())
    sums = []
    for _, w in parts:
        sums.append(total + w)
        total = sums[-1][:, :, -1:]
    worst = largest_difference(torch.cat(sums, dim=2), whole[1])
    if whole[0] is not None:
        factors = torch.cat([cast(Tensor, u) for u, _ in parts], dim=2)
        worst = max(worst, largest_difference(factors, whole[0]))
    return at_most(1e-9, worst)


def backends_agree(subject: Subject) -> Finding:
    """eager and sdpa give the same loss and gradients."""
    position = subject.position()
    if position.has("on_scores"):
        return Finding(NOT_APPLICABLE, "scores that look at content exist in eager only")
    length = min(longest_length(position), 300)
    ids = random_ids(length + 1)
    results = []
    for backend in ("eager", "sdpa"):
        gpt = subject.gpt(backend)
        losses = gpt(ids[:, :-1], labels=ids[:, 1:])
        losses.mean().backward()
        result = {"loss": losses.detach()}
        for name, parameter in gpt.named_parameters():
            if parameter.grad is not None:
                result[name] = parameter.grad
        results.append(result)
    return at_most(1e-4, largest_difference_in(*results))


def gradients_match_finite_differences(subject: Subject) -> Finding:
    """Gradients match finite differences in float64."""
    position = subject.position().double()
    parameters = list(position.parameters())
    if not parameters:
        return LEARNS_NOTHING
    for owner, name, parameter in position.own_parameters():  # beyond a bound, it is constant
        low, high = owner.bounds.get(name, UNBOUNDED)
        margin = min(1e-3, (high - low) / 4)
        parameter.data.clamp_(low + margin, high - margin)
    torch.manual_seed(1)
    shape = position.shape
    length = shape.train_length
    heads = shape.heads
    q, k = torch.randn(2, 1, heads, length, shape.head_dim, dtype=torch.float64)
    x = torch.randn(1, length, shape.hidden, dtype=torch.float64)
    score_weights = torch.randn(heads, length, length, dtype=torch.float64)
    x_weights = torch.randn_like(x)
    ids = random_ids(length)

    def value(*_: Tensor) -> Tensor:
        changed = position.on_embeddings_by_ids(position.on_embeddings(x), ids, {})
        return (x_weights * changed).sum() + (score_weights * scores(position, q, k, x)).sum()

    same = torch.autograd.gradcheck(
        value, parameters, atol=1e-4, rtol=1e-4, fast_mode=True, raise_exception=False
    )
    if same:
        return Finding(HOLDS)
    return Finding(FAILS, "they differ")


def gradients_reach_every_parameter(subject: Subject) -> Finding:
    """Gradients reach every parameter of a model.

    At once, or after one step: where a learned factor begins at 0, the other has no gradient yet.
    """
    gpt = subject.gpt().train()
    length = subject.train_length
    ids = random_ids(length + 1, batch=2)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
    unreached = set(dict(gpt.named_parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        losses = gpt(ids[:, :-1], labels=ids[:, 1:])
        losses.mean().backward()
        for name, parameter in gpt.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                return Finding(FAILS, f"{name} gets no gradient")
            if not gradient.isfinite().all():
                return Finding(FAILS, f"the gradient of {name} is not finite")
            if gradient.any():
                unreached.discard(name)
        optimizer.step()
    if unreached:
        example = min(unreached)
        detail = f"the gradient of {example} is 0 at {length} tokens"
        return Finding(FAILS, detail)
    return Finding(HOLDS)


@torch.no_grad()
def bounds_hold_anywhere(subject: Subject) -> Finding:
    """Learned numbers act within bounds, wherever they drift."""
    if not list(subject.position().parameters()):
        return LEARNS_NOTHING
    for value in (-5.0, 5.0):
        position = subject.position()
        for parameter in position.parameters():  # DeepSpeed's bf16 engine stores these
            parameter.data = torch.full_like(parameter, value, dtype=torch.bfloat16)
        stored = f"where {value:g} is stored"
        for owner, name, _ in position.own_parameters():
            acting = owner.bounded(name)
            low, high = owner.bounds.get(name, UNBOUNDED)
            inside = (acting >= low) & (acting <= high) & acting.isfinite()
            if acting.dtype != torch.float32 or not inside.all():
                return Finding(FAILS, f"{name} leaves its bounds or float32 {stored}")
        problem = infinite_effect(effects_before(position, longest_length(position)))
        if problem:
            return Finding(FAILS, f"{problem} {stored}")
    return Finding(HOLDS, "stored as -5 and as 5")


CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    right_shape,
    shift_invariant,
    zero_at_zero,
    never_rises,
    conditionally_positive_definite,
    finite_far_away,
    float32_in_half_precision,
    survives_saving,
    later_tokens_change_nothing,
    cached_is_full,
    parts_sum_to_the_whole,
    backends_agree,
    gradients_match_finite_differences,
    gradients_reach_every_parameter,
    bounds_hold_anywhere,
)
