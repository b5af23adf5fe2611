"""Keeps the numbers of an encoding in float32, whatever the dtype of the model around it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
UNBOUNDED = (-math.inf, math.inf)


class Float32Module(nn.Module):
    """A module that computes in float32 while the model computes in half precision.

    An encoding has few numbers, and rounding them spoils every far distance: a slope rounded to
    bfloat16 shifts a key at distance 16384 by up to 64 tokens. Two things would round them:

    * `.bfloat16()` and `.half()` cast every tensor. `_apply` moves ours and undoes the cast.
    * DeepSpeed's bf16 engine casts the stored parameters. `bounded` reads them in float32, and
      takes the value of `exact` where training has set one.

    `bounds` names the learned parameters that live in an interval.
    """

    bounds: Mapping[str, tuple[float, float]] = {}
    origin: Tensor
    # Compute as the forks do: what the code around `rounded` says. Position sets it.
    paper_precision: bool = False

    def __init__(self) -> None:
        super().__init__()
        # Float32 values of parameters that an engine rounds; training sets them after a step.
        self.exact: dict[str, Tensor] = {}
        # Its device and dtype (float32 or float64) are those that we compute in; its value is 0.
        self.register_buffer("origin", torch.zeros(()), persistent=False)

    def bounded(self, name: str) -> Tensor:
        """The parameter `name` as it acts: in float32, and within its bounds; a buffer as it is."""
        if name in self._buffers:
            return self.get_buffer(name)
        low, high = self.bounds.get(name, UNBOUNDED)
        return self.bounded_to(name, low, high)

    def bounded_to(self, name: str, low: float, high: float) -> Tensor:
        """The parameter `name` in float32 and within [low, high].

        `name` may be a path into a module that belongs to this one: "net.0.weight".
        """
        value = at_least_float32(attrgetter(name)(self))
        if name in self.exact:
            correction = (self.exact[name] - value).detach()
            value = value + correction  # the exact value; the gradient reaches the parameter
        return within(value, low, high)

    def mapped(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """A linear map by parameters of these names: [..., inputs] -> [..., outputs]."""
        added = None if bias is None else self.bounded(bias)
        return F.linear(at_least_float32(x), self.bounded(weight), added)

    def take_over(self, layer: nn.Linear | nn.Conv1d, place: str) -> None:
        """Learn the first values of a layer as parameters whose names hold `place`."""
        assert layer.bias is not None
        for name, value in (("weight", layer.weight), ("bias", layer.bias)):
            self.register_parameter(place.format(name), nn.Parameter(value.detach()))

    def rounded(self, x: Tensor) -> Tensor:
        """x, in bfloat16 where `paper_precision` asks for it."""
        return x.bfloat16() if self.paper_precision else x

    def learned(self) -> dict[str, Tensor]:
        """All learned numbers as they act, by name, on the CPU: for logs and plots."""
        values = {}
        with torch.no_grad():
            for path, owner, name, parameter in self._placed_parameters():
                if parameter.numel():  # ZeRO 3 takes large ones apart between steps
                    values[path] = owner.bounded(name).detach().cpu()
        return values

    def in_float32(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function` of the inputs, with the parameters of modules such as nn.Linear in float32.

        `bounded` does this for the parameters of the encoding itself. Gradients reach all of them.
        """
        substitutes = {}
        for path, owner, name, parameter in self._placed_parameters():
            lies_in_a_module = "." in name
            if lies_in_a_module and parameter.dtype in HALF:
                substitutes[path] = owner.bounded_to(name, *UNBOUNDED)
        if not substitutes:
            return function(*inputs)
        return torch.func.functional_call(self, substitutes, (function, *inputs))

    def forward(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run `function` of the inputs: in_float32 calls it while substitutes are in place."""
        return function(*inputs)

    def own_parameters(self) -> Iterator[tuple["Float32Module", str, nn.Parameter]]:
        """(owner, name, parameter) of this encoding and of the encodings inside it.

        A name may be a path into a module of the owner: "net.0.weight".
        """
        for _, owner, name, parameter in self._placed_parameters():
            yield owner, name, parameter

    def _placed_parameters(self) -> Iterator[tuple[str, "Float32Module", str, nn.Parameter]]:
        """`own_parameters`, each after its path in this encoding.

        By names: a graph that is compiled for the identity of a parameter serves one layer alone.
        """
        for place, owner in self.named_modules():
            if not isinstance(owner, Float32Module):
                continue
            inside = []
            for path, module in owner.named_modules():
                if isinstance(module, Float32Module) and module is not owner:
                    inside.append(f"{path}.")
            for name, parameter in owner.named_parameters():
                if not name.startswith(tuple(inside)):
                    yield f"{place}.{name}".lstrip("."), owner, name, parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The call behind `.to`, `.cuda` and `.bfloat16`: tensors move, but are never rounded."""
        before = [tensor.detach() for tensor in (*self.parameters(), *self.buffers())]
        super()._apply(fn, recurse)
        after = (*self.parameters(), *self.buffers())
        for exact, tensor in zip(before, after, strict=True):
            if exact.dtype not in HALF and tensor.dtype in HALF:
                tensor.data = exact.to(tensor.device)
        return self


def within(x: Tensor, low: float, high: float) -> Tensor:
    """x held in [low, high] in the forward pass; the gradient passes, so a value can come back."""
    if (low, high) == UNBOUNDED:
        return x
    zero_with_gradient = x - x.detach()  # added last, so that the bound is met exactly
    return x.detach().clamp(low, high) + zero_with_gradient


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.float() if x.dtype in HALF else x


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast rounds nothing on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


@contextmanager
def in_float32_on_cpu() -> Iterator[None]:
    """Build encodings, which compute fixed numbers, where a model is built without memory."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
