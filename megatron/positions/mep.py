"""MEP: the log of a weighted mean of kernels (arXiv 2403.17698), and its published mixtures.

The authors' fork chooses the mixture by commenting source lines in and out. Here it is an option,
and the checkpoint keeps it.
"""

import operator
from collections.abc import Iterable, Sequence
from functools import partialmethod, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import DistanceBias, Fork, Shape
from megatron.positions.registry import build, listed, named, positive, register

LEARNED = ("learned", "learned_shared")
MOST_KERNELS = 64

# exp(-s·d) is ALiBi's kernel. The MEP paper names it by its form.
KERNEL_NAMES = {"exp": "alibi"}

# A mixture asks its kernels for their bias by distance only.
OTHER_HOOKS = (
    "prepare",
    "on_embeddings",
    "on_embeddings_by_ids",
    "on_queries_keys",
    "on_queries_keys_at",
    "on_queries_keys_by_content",
    "distance_weight",
    "score_scale",
    "index_bias",
    "block_scores",
    "score_bias",
    "on_scores",
)


@register("mep")
class Mixture(DistanceBias):
    """Your own mixture of kernels: log Σ_k w_k exp(table_k), the log of a weighted mean.

    kernels: a list of biases by distance, each a name, {name: {options}} or {name: slope_factor}.
        exp is the paper's name for alibi. An entry mep is a mixture inside the mixture
    weights: "equal", positive numbers that sum to 1, "learned" (a softmax over kernels for each
        head) or "learned_shared" (one softmax for all heads). Learned weights start equal
    """

    # The authors' class stores what any parameterised mixture needs, used or not.
    fork = Fork(unused=("slopes", "weight", "bias_p", "bias_a"))
    log_weights: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        kernels: Sequence[Any],
        weights: str | Sequence[float] = "equal",
    ) -> None:
        super().__init__(shape)
        items = listed("kernels", kernels, example="[exp, gaussian]", most=MOST_KERNELS)
        self.kernels = nn.ModuleList(_build_kernel(shape, item) for item in items)
        count = len(items)
        learned = weights in LEARNED
        self.has_equal_weights = weights == "equal"
        if learned or self.has_equal_weights:
            fixed = [1 / count] * count
        else:
            example = "equal, learned, learned_shared or a list of one number for each kernel"
            numbers = listed("weights", weights, example=example, most=MOST_KERNELS)
            fixed = [positive("weights", weight) for weight in numbers]
            if len(fixed) != count:
                raise UserError(
                    f"weights: {len(fixed)} numbers for {count} kernels; give one weight per kernel"
                )
            if abs(sum(fixed) - 1) > 1e-6:
                raise UserError(
                    f"weights: {numbers} sum to {sum(fixed):g}; make them sum to 1, or write"
                    " weights: equal"
                )
        self.register_buffer("log_weights", torch.tensor(fixed).log()[:, None], persistent=False)
        columns = 1 if weights == "learned_shared" else shape.heads
        self.weight_logits = nn.Parameter(torch.zeros(count, columns)) if learned else None

    def log_kernel(self, distance: Tensor) -> Tensor:
        if self.weight_logits is None:
            log_weights = self.log_weights  # [kernels, 1]
        else:
            log_weights = self.bounded("weight_logits").log_softmax(dim=0)  # [kernels, heads or 1]
        kernels = cast(Iterable[DistanceBias], self.kernels)
        tables = [kernel.log_kernel(distance) for kernel in kernels]
        log_terms = log_weights[:, :, None] + torch.stack(tables)  # [kernels, heads, length]
        # Not log(mean(exp)): all kernels but the slowest underflow within the training length.
        return torch.logsumexp(log_terms, dim=0)

    @property
    def is_published(self) -> bool:
        """Whether every kernel is in the forks' code."""
        return all(kernel.is_published for kernel in self.inside)

    def paper_kernel(self, distance: Tensor) -> Tensor:
        """log of the sum of kernels, which underflows to -inf, as in the authors' two classes."""
        has_learned_numbers = next(self.parameters(), None) is not None
        if has_learned_numbers:
            # Their class for learned kernels squares distances that are rounded already.
            distance = distance.bfloat16().to(distance.dtype)
        kernels = cast(Iterable[DistanceBias], self.kernels)
        probabilities = [kernel.paper_probability(distance) for kernel in kernels]
        # Their weighted mean, one after the other: [heads, length].
        if self.has_equal_weights:
            return torch.log(reduce(operator.add, probabilities) / len(probabilities))
        weights = self.log_weights.exp()
        if self.weight_logits is not None:
            weights = self.bounded("weight_logits").softmax(dim=0)
        weights = self.rounded(weights)
        terms = [weight[:, None] * p for weight, p in zip(weights, probabilities, strict=True)]
        return torch.log(reduce(operator.add, terms))


@register("mep_free", aliases=("snope_norm_original_scaling__", "snope_norm_original_scaling_"))
class MepFree(Mixture):
    """The paper's mixture without parameters: log mean of exp(-s·d), exp(-s·d/2) and exp(-s·d²).

    s are ALiBi's slopes. At large distances it is -s·d/2 - log 3, which is ALiBi with half slopes:
    to see what the mixture adds, compare it with `alibi` and slope_factor 0.5.
    """

    fork = Fork()

    __init__ = partialmethod(Mixture.__init__, kernels=("exp", {"exp": 0.5}, "gaussian"))


@register("mep_param")
class MepParam(Mixture):
    """The learned mixture of the paper's first version: log of the mean of two kernels.

    The kernels are exp(-s·d²) and (1 + a·d)^-p. s are ALiBi's slopes; a and p are learned.
    """

    fork = Fork(unused=("weight",))  # T5's table: see Mixture

    __init__ = partialmethod(Mixture.__init__, kernels=("gaussian", "kerple_log"))


@register("mep_param_t5", aliases=("snope_kerplelog",))
class MepParamT5(Mixture):
    """The learned mixture of the released code: log of the mean of four kernels.

    The kernels are exp(-s·d²), exp(-s·d), exp(T5's bias) and (1 + a·d)^-p, with ALiBi's slopes s
    and learned a, p and bias.
    """

    fork = Fork()

    __init__ = partialmethod(Mixture.__init__, kernels=("gaussian", "exp", "t5", "kerple_log"))


def _build_kernel(shape: Shape, item: Any) -> DistanceBias:
    """One kernel of a mixture from its YAML form: a name, {name: {options}} or {name: factor}."""
    if isinstance(item, dict):  # {name: factor} is short for {name: {slope_factor: factor}}
        item = {
            name: options if isinstance(options, dict) else {"slope_factor": options}
            for name, options in item.items()
        }
    name, options = named("kernels", item)
    registered = KERNEL_NAMES.get(name, name)
    try:
        kernel = build(registered, shape, **options)
    except UserError as fault:
        message = str(fault).replace(f"pos_emb_args: {registered}", f"kernels: {name}", 1)
        raise UserError(message.replace("pos_emb:", "kernels:", 1)) from None
    if not isinstance(kernel, DistanceBias) or any(kernel.has(hook) for hook in OTHER_HOOKS):
        raise UserError(f"kernels: {name} is more than a bias by distance, so it cannot be mixed")
    return kernel
