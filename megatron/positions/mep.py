"""MEP: the log of a mean of kernels (arXiv 2403.17698), and its published mixtures as presets.

The authors' fork chooses the mixture by commenting source lines in and out. Here it is an option,
and the checkpoint keeps it.
"""

from collections.abc import Sequence
from typing import Any

from megatron.positions.base import Shape
from megatron.positions.mixture import Mixture
from megatron.positions.registry import register

register("mep")(Mixture)


@register("mep_free", aliases=("snope_norm_original_scaling__", "snope_norm_original_scaling_"))
class MepFree(Mixture):
    """log of the mean of exp(-s·d), exp(-s·d/2) and exp(-s·d²), with ALiBi's slopes s.

    The paper's mixture without parameters. At large distances it is -s·d/2 - log 3, which is ALiBi
    with half slopes: `alibi` with slope_factor 0.5 is the control.
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
    """log of the mean of exp(-s·d²) and (1 + a·d)^-p, with ALiBi's slopes s and learned a and p.

    The parameterised mixture of the paper's first version.
    """

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
    """log of the mean of exp(-s·d²), exp(-s·d), exp(T5's bias) and (1 + a·d)^-p.

    The parameterised mixture of the released code, with ALiBi's slopes s and learned a, p and bias.
    """

    reference_unused = ()

    def __init__(
        self,
        shape: Shape,
        *,
        kernels: Sequence[Any] = ("gaussian", "exp", "t5", "kerple_log"),
        weights: str | Sequence[float] = "equal",
    ) -> None:
        super().__init__(shape, kernels=kernels, weights=weights)
