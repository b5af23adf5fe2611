"""A mixture of kernels: the log of a weighted mean (MEP, arXiv 2403.17698), as a language for the YAML."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import DistanceBias, Position, Shape
from megatron.positions.registry import ALIASES, REGISTRY, build, positive, suggestion

LEARNED = ("learned", "learned_shared")


class Mixture(DistanceBias):
    """log Σ_k w_k exp(table_k), the log of a weighted mean of kernels (MEP, arXiv 2403.17698).

    kernels: a list of encodings that are functions of the distance, each a name, {name: {options}} or
        {name: slope_factor}; exp is alibi by the paper's name, and a mixture may hold another (mep)
    weights: "equal", a list of positive numbers that sum to 1, "learned" (softmax over kernels, per head) or
        "learned_shared" (one softmax for all heads); learned ones start equal
    """

    # The authors' class for parameterised mixtures stores what any of its kernels needs, used or not.
    reference_unused = ("slopes", "weight", "bias_p", "bias_a")
    log_weights: Tensor

    def __init__(
        self, shape: Shape, *, kernels: Sequence[Any], weights: str | Sequence[float] = "equal"
    ) -> None:
        super().__init__(shape)
        if not isinstance(kernels, Sequence) or isinstance(kernels, str) or not kernels:
            raise UserError(
                f"kernels: {kernels!r} is not a list of kernels; write kernels: [exp, gaussian]"
            )
        self.kernels = nn.ModuleList(_kernel(shape, item) for item in kernels)
        count, learned = len(kernels), weights in LEARNED
        fixed = [1 / count] * count if learned or weights == "equal" else _checked(weights, count)
        self.register_buffer("log_weights", torch.tensor(fixed).log()[:, None], persistent=False)
        start = torch.zeros(count, 1 if weights == "learned_shared" else shape.heads)
        self.weight_logits = nn.Parameter(start) if learned else None

    def log_kernel(self, distance: Tensor) -> Tensor:
        if self.weight_logits is None:
            log_weights = self.log_weights  # [kernels, 1]
        else:
            log_weights = self.bounded("weight_logits").log_softmax(dim=0)  # [kernels, heads or 1]
        kernels = cast(Iterable[DistanceBias], self.kernels)
        tables = torch.stack(
            [kernel.log_kernel(distance) for kernel in kernels]
        )  # [kernels, heads, length]
        # logsumexp, not log(mean(exp)): every kernel but the slowest underflows within the training window.
        return torch.logsumexp(log_weights[:, :, None] + tables, dim=0)


_KERNEL_NAMES = {"exp": "alibi"}  # exp(-s·d) is ALiBi's kernel; the MEP paper calls it by its shape


def _kernel(shape: Shape, item: Any) -> DistanceBias:
    """One kernel of a mixture from its YAML form: a name, {name: {options}} or {name: slope_factor}."""
    if isinstance(item, dict) and len(item) == 1:
        ((name, options),) = item.items()
        options = options if isinstance(options, dict) else {"slope_factor": options}
    elif isinstance(item, str):
        name, options = item, {}
    else:
        raise UserError(
            f"kernels: {item!r} is not a kernel; write a name or {{name: {{option: value}}}}"
        )
    known = {*_KERNEL_NAMES, *(key for key, encoding in REGISTRY.items() if _mixable(encoding))}
    registered = _KERNEL_NAMES.get(name, ALIASES.get(name, name))
    if registered in REGISTRY and registered not in known:
        raise UserError(f"kernels: {name} is more than a bias by distance, so it cannot be mixed")
    if registered not in known:
        raise UserError(f"kernels: no kernel is called {name!r}; {suggestion(name, known)}")
    try:
        return cast(DistanceBias, build(registered, shape, **options))
    except UserError as fault:
        raise UserError(
            str(fault).replace(f"pos_emb_args: {registered}", f"kernels: {name}", 1)
        ) from None


def _mixable(encoding: type[Position]) -> bool:
    """Whether an encoding is a bias by distance and nothing else: any other hook would be lost in a mixture."""
    others = (
        "prepare",
        "on_embeddings",
        "on_queries_keys",
        "distance_weight",
        "index_bias",
        "on_scores",
    )
    return issubclass(encoding, DistanceBias) and all(
        getattr(encoding, h) is getattr(Position, h) for h in others
    )


def _checked(weights: Any, kernels: int) -> list[float]:
    """Given weights as positive numbers, one for each kernel, that sum to 1."""
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise UserError(
            f"weights: {weights!r} is not equal, learned, learned_shared or a list of {kernels} numbers"
        )
    numbers = [positive("weights", weight) for weight in weights]
    if len(numbers) != kernels:
        raise UserError(
            f"weights: {len(numbers)} numbers for {kernels} kernels; give one weight per kernel"
        )
    if abs(sum(numbers) - 1) > 1e-6:
        raise UserError(
            f"weights: {list(weights)} sum to {sum(numbers):g}; make them sum to 1, or write weights: equal"
        )
    return numbers
