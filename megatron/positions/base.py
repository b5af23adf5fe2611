"""What every positional encoding is made of: the hooks, the float32 rule, mixtures and the registry."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from megatron.errors import UserError


@dataclass(frozen=True)
class Shape:
    """The sizes that an encoding may depend on."""

    heads: int
    head_dim: int
    hidden: int
    train_length: int


class Position(nn.Module):
    """A positional encoding: any of four optional hooks. Its numbers stay float32 whatever the model's dtype.

    `bounds` names the learned parameters that live in an interval; `bounded` and `learned` give their effective values.
    `reference_names` says under which name the GPT-NeoX forks keep a parameter or fixed tensor of ours in checkpoints;
    `reference_unused` lists tensors that they store without using them.
    """

    bounds: ClassVar[dict[str, tuple[float, float]]] = {}
    reference_names: ClassVar[dict[str, str]] = {}
    reference_unused: ClassVar[tuple[str, ...]] = ()
    origin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        # float32 values of parameters that an engine keeps rounded in half precision (training sets them after a step).
        self.exact: dict[str, Tensor] = {}
        # Says on which device, and in float32 or float64, this encoding computes; it holds nothing else.
        self.register_buffer("origin", torch.zeros(()), persistent=False)

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        """Once, before the first layer: [batch, length, hidden] -> same; `start` is the position of the first token."""
        return x

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """In every layer: [batch, heads, length, head_dim] each -> same."""
        return q, k

    def distance_bias(self, length: int) -> Tensor | None:
        """-> [heads, length] float32 or None; column d is added to the score of the key d tokens back."""
        return None

    def distance_weight(self, length: int) -> Tensor | None:
        """-> [heads, length] float32 or None; multiplies q·k/√head_dim before the bias (KERPLE's weight kernels)."""
        return None

    def distances(self, length: int) -> Tensor:
        """0, 1, …, length - 1: [length] float32, exact up to 2^24."""
        return torch.arange(length, device=self.origin.device).to(self.origin.dtype)

    def bounded(self, name: str) -> Tensor:
        """The parameter `name` as it acts: within its bounds, and in float32 although an engine may have rounded it."""
        value = at_least_float32(getattr(self, name))
        if name in self.exact:
            value = value + (self.exact[name] - value).detach()
        return within(value, *self.bounds.get(name, (-math.inf, math.inf)))

    def learned(self) -> dict[str, Tensor]:
        """The effective values of all learned numbers, by name, for logs and plots."""
        names = {id(module): prefix for prefix, module in self.named_modules()}
        with torch.no_grad():
            return {
                f"{names[id(module)]}.{name}".lstrip("."): module.bounded(name).detach().cpu()
                for module, name, parameter in self.own_parameters()
                if parameter.numel()  # ZeRO 3 takes large ones apart between steps
            }

    def own_parameters(self) -> Iterator[tuple["Position", str, nn.Parameter]]:
        """(encoding, name, parameter) of this encoding and of those that it is made of."""
        for module in self.modules():
            if isinstance(module, Position):
                yield from ((module, name, value) for name, value in module.named_parameters(recurse=False))

    def reference(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs (name in the forks' checkpoints, our tensor): parameters are to be loaded, buffers to be compared."""
        for module in self.modules():
            if isinstance(module, Position):
                yield from ((theirs, getattr(module, ours)) for ours, theirs in module.reference_names.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Position":
        """Move as told but never round: `.bfloat16()` on these few numbers would spoil every far distance."""
        before = {
            name: tensor for name, tensor in self._own_tensors() if tensor.dtype in (torch.float32, torch.float64)
        }
        before = {name: tensor.detach().clone() for name, tensor in before.items()}
        super()._apply(fn, recurse)
        for name, tensor in self._own_tensors():
            if name in before and tensor.dtype in (torch.bfloat16, torch.float16):
                tensor.data = before[name].to(tensor.device)
        return self

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters(recurse=False)
        yield from self.named_buffers(recurse=False)


class DistanceBias(Position):
    """An encoding that is one function of the distance; families write `log_kernel` only."""

    def log_kernel(self, distance: Tensor) -> Tensor:
        """What is added to the scaled score: [length] float32 -> [heads, length] float32."""
        raise NotImplementedError

    def distance_bias(self, length: int) -> Tensor:
        return self.table(self.log_kernel, length)

    def table(self, function: Callable[[Tensor], Tensor], length: int) -> Tensor:
        """`function` of the distances 0 … length - 1 outside autocast: -> [heads, length] float32."""
        distance = self.distances(length)
        with torch.autocast(distance.device.type, enabled=False):
            table = function(distance)
        expected = (self.shape.heads, length)
        if tuple(table.shape) != expected or table.dtype != distance.dtype:
            raise TypeError(
                f"{type(self).__name__}: a kernel must give {list(expected)} {distance.dtype},"
                f" not {list(table.shape)} {table.dtype}"
            )
        return table


class Mixture(DistanceBias):
    """log Σ_k w_k exp(table_k), the log of a weighted mean of kernels (MEP, arXiv 2403.17698).

    kernels: a list of encodings, each a name, {name: {options}} or {name: slope_factor}
    weights: "equal", a list of positive numbers that sum to 1, or "learned" (softmax over kernels, per head)
    """

    log_weights: Tensor

    def __init__(self, shape: Shape, *, kernels: Sequence[Any], weights: str | Sequence[float] = "equal") -> None:
        super().__init__(shape)
        if not isinstance(kernels, Sequence) or isinstance(kernels, str) or not kernels:
            raise UserError(f"kernels: {kernels!r} is not a list of kernels; write kernels: [exp, gaussian]")
        self.kernels = nn.ModuleList(_kernel(shape, item) for item in kernels)
        count = len(kernels)
        fixed = [1 / count] * count if weights in ("equal", "learned") else _checked(weights, count)
        self.register_buffer("log_weights", torch.tensor(fixed).log()[:, None], persistent=False)
        self.weight_logits = nn.Parameter(torch.zeros(count, shape.heads)) if weights == "learned" else None

    def log_kernel(self, distance: Tensor) -> Tensor:
        if self.weight_logits is None:
            log_weights = self.log_weights  # [kernels, 1]
        else:
            log_weights = self.bounded("weight_logits").log_softmax(dim=0)  # [kernels, heads]
        kernels = cast(Iterable[DistanceBias], self.kernels)
        tables = torch.stack([kernel.log_kernel(distance) for kernel in kernels])  # [kernels, heads, length]
        # logsumexp, not log(mean(exp)): every kernel but the slowest underflows within the training window.
        return torch.logsumexp(log_weights[:, :, None] + tables, dim=0)


def within(x: Tensor, low: float, high: float) -> Tensor:
    """x held in [low, high] in the forward pass; the gradient passes, so a value outside can come back."""
    if low == -math.inf and high == math.inf:
        return x
    return x + (x.clamp(low, high) - x).detach()


def at_least(x: Tensor, low: float) -> Tensor:
    """x, or `low` where x is smaller, in the forward pass; the gradient passes."""
    return within(x, low, math.inf)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


REGISTRY: dict[str, type[Position]] = {}
"""Every encoding by its name in the YAML key `pos_emb`."""

ALIASES: dict[str, str] = {}
"""Names used by the GPT-NeoX forks, and ours for the same thing."""


def register(name: str, *, aliases: Sequence[str] = ()) -> Callable[[type], type]:
    """Make a class known as `pos_emb: name`; `aliases` are the forks' spellings of it."""

    def add(encoding: type) -> type:
        taken = {name, *aliases} & (REGISTRY.keys() | ALIASES.keys())
        if taken:
            raise ValueError(f"{encoding.__name__}: the name {sorted(taken)[0]!r} is taken by another encoding")
        REGISTRY[name] = encoding
        ALIASES.update(dict.fromkeys(aliases, name))
        return encoding

    return add


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The keyword options that the encoding `name` takes."""
    parameters = inspect.signature(encoding_called(name).__init__).parameters
    return {key: value for key, value in parameters.items() if value.kind is inspect.Parameter.KEYWORD_ONLY}


def build(name: str, shape: Shape, **options: Any) -> Position:
    """The encoding `name` for a model of this shape; UserError for an unknown name, option or value."""
    encoding, known = encoding_called(name), options_of(name)
    for option in options:
        if option not in known:
            raise UserError(f"pos_emb_args: {name} takes no option {option!r}; {_suggestion(option, known)}")
    missing = [key for key, value in known.items() if value.default is inspect.Parameter.empty and key not in options]
    if missing:
        raise UserError(f"pos_emb_args: {name} needs the option {missing[0]}; write pos_emb_args: {{{missing[0]}: …}}")
    try:
        return encoding(shape, **options)
    except UserError as fault:
        raise UserError(f"pos_emb_args: {name}: {fault}") from None


def encoding_called(name: str) -> type[Position]:
    """The class registered under `name` or under a fork's spelling of it."""
    known = ALIASES.get(name, name)
    if known not in REGISTRY:
        raise UserError(f"pos_emb: no encoding is called {name!r}; {_suggestion(name, REGISTRY)}")
    return REGISTRY[known]


def positive(name: str, value: Any) -> float:
    """`value` as a positive number, or a UserError that names the option."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{name}: {value!r} is not a positive number")
    return float(value)


def _suggestion(wrong: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(sorted(known)) or 'none'}"


_KERNEL_NAMES = {"exp": "alibi"}  # exp(-s·d) is ALiBi's kernel; the MEP paper calls it by its shape


def _kernel(shape: Shape, item: Any) -> DistanceBias:
    """One kernel of a mixture from its YAML form: a name, {name: {options}} or {name: slope_factor}."""
    if isinstance(item, dict) and len(item) == 1:
        ((name, options),) = item.items()
        options = options if isinstance(options, dict) else {"slope_factor": options}
    elif isinstance(item, str):
        name, options = item, {}
    else:
        raise UserError(f"kernels: {item!r} is not a kernel; write a name or {{name: {{option: value}}}}")
    name = _KERNEL_NAMES.get(name, name)
    known = {*_KERNEL_NAMES, *(key for key, encoding in REGISTRY.items() if issubclass(encoding, DistanceBias))}
    if name in REGISTRY and name not in known:
        raise UserError(f"kernels: {name} is not a function of the distance, so it cannot be mixed")
    if name in REGISTRY and REGISTRY[name].distance_weight is not Position.distance_weight:
        raise UserError(f"kernels: {name} multiplies scores, and only what is added to them can be mixed")
    if ALIASES.get(name, name) not in known:
        raise UserError(f"kernels: no kernel is called {name!r}; {_suggestion(name, known)}")
    return cast(DistanceBias, build(name, shape, **options))


def _checked(weights: Any, kernels: int) -> list[float]:
    """Given weights as positive numbers, one for each kernel, that sum to 1."""
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise UserError(f"weights: {weights!r} is not equal, learned or a list of {kernels} numbers")
    numbers = [positive("weights", weight) for weight in weights]
    if len(numbers) != kernels:
        raise UserError(f"weights: {len(numbers)} numbers for {kernels} kernels; give one weight per kernel")
    if abs(sum(numbers) - 1) > 1e-6:
        raise UserError(
            f"weights: {list(weights)} sum to {sum(numbers):g}; make them sum to 1, or write weights: equal"
        )
    return numbers
