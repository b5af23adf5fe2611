"""MEP: the log of a mean of kernels (arXiv 2403.17698), and its published mixtures as presets.

The authors' fork picks the mixture by commenting source lines; here it is an option, kept with the checkpoint.
"""

from collections.abc import Sequence
from typing import Any

from megatron.positions.base import Shape
from megatron.positions.mixture import Mixture
from megatron.positions.registry import register

register("mep")(Mixture)


@register("mep_free", aliases=("snope_norm_original_scaling__", "snope_norm_original_scaling_"))
class MepFree(Mixture):
    """Without parameters: equal weights of exp(-s·d), exp(-s·d/2) and exp(-s·d²) on ALiBi's slopes s.

    Far out it is -s·d/2 - log 3: ALiBi with half slopes (`alibi` with slope_factor 0.5 is the control).
    """

    reference_unused = ()

    def __init__(
        self,
        shape: Shape,
        *,
        kernels: Sequence[Any] = ("exp", {"exp": 0.5}, "gaussian"),
        weights: str | Sequence[float] = "equal",
    ) -> None:
        super().__init__(shape, kernels=kernels, weights=weights)


@register("mep_param")
class MepParam(Mixture):
    """Parameterised, two kernels as in the paper's first version: equal weights of exp(-s·d²) and (1 + a·d)^-p."""

    reference_unused = ("weight",)  # T5's table: see Mixture

    def __init__(
        self,
        shape: Shape,
        *,
        kernels: Sequence[Any] = ("gaussian", "kerple_log"),
        weights: str | Sequence[float] = "equal",
    ) -> None:
        super().__init__(shape, kernels=kernels, weights=weights)


@register("mep_param_t5", aliases=("snope_kerplelog",))
class MepParamT5(Mixture):
    """Parameterised, four kernels as in the released code: exp(-s·d²), exp(-s·d), T5's bias and (1 + a·d)^-p."""

    reference_unused = ()

    def __init__(
        self,
        shape: Shape,
        *,
        kernels: Sequence[Any] = ("gaussian", "exp", "t5", "kerple_log"),
        weights: str | Sequence[float] = "equal",
    ) -> None:
        super().__init__(shape, kernels=kernels, weights=weights)
