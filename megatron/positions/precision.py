"""Keeps the numbers of an encoding in float32, whatever the dtype of the model around it."""

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import ClassVar, Self

import torch
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

    bounds: ClassVar[dict[str, tuple[float, float]]] = {}
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
        """The parameter `name` as it acts: in float32, and within its bounds."""
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

    def rounded(self, x: Tensor) -> Tensor:
        """x, in bfloat16 where `paper_precision` asks for it."""
        return x.bfloat16() if self.paper_precision else x

    def learned(self) -> dict[str, Tensor]:
        """All learned numbers as they act, by name, on the CPU: for logs and plots."""
        paths = {id(module): path for path, module in self.named_modules()}
        values = {}
        with torch.no_grad():
            for owner, name, parameter in self.own_parameters():
                if not parameter.numel():  # ZeRO 3 takes large ones apart between steps
                    continue
                path = _joined(paths[id(owner)], name)
                values[path] = owner.bounded(name).detach().cpu()
        return values

    def in_float32(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function` of the inputs, with the parameters of modules such as nn.Linear in float32.

        `bounded` does this for the parameters of the encoding itself. Gradients reach all of them.
        """
        substitutes = self._float32_substitutes()
        if not substitutes:
            return function(*inputs)
        return torch.func.functional_call(self, substitutes, (function, *inputs))

    def forward(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run `function` of the inputs: in_float32 calls it while substitutes are in place."""
        return function(*inputs)

    def _float32_substitutes(self) -> dict[str, Tensor]:
        """Float32 values for the rounded parameters of modules that are no Float32Module."""
        paths = {id(module): path for path, module in self.named_modules()}
        substitutes = {}
        for owner, name, parameter in self.own_parameters():
            lies_in_a_module = "." in name
            if lies_in_a_module and parameter.dtype in HALF:
                path = _joined(paths[id(owner)], name)
                substitutes[path] = owner.bounded_to(name, *UNBOUNDED)
        return substitutes

    def own_parameters(self) -> Iterator[tuple["Float32Module", str, nn.Parameter]]:
        """(owner, name, parameter) of this encoding and of the encodings inside it.

        A name may be a path into a module of the owner: "net.0.weight".
        """
        for owner in self.modules():
            if isinstance(owner, Float32Module):
                for path, module in owner._own_modules():
                    for name, parameter in module.named_parameters(recurse=False):
                        yield owner, _joined(path, name), parameter

    def _own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of this encoding and its modules, without encodings inside it."""
        waiting: list[tuple[str, nn.Module]] = [("", self)]
        while waiting:
            path, module = waiting.pop(0)
            yield path, module
            for name, child in module.named_children():
                if not isinstance(child, Float32Module):
                    waiting.append((_joined(path, name), child))

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(path, tensor) of all parameters, then all buffers, module by module."""
        for path, module in self._own_modules():
            for name, parameter in module.named_parameters(recurse=False):
                yield _joined(path, name), parameter
            for name, buffer in module.named_buffers(recurse=False):
                yield _joined(path, name), buffer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to`, `.cuda` and `.bfloat16` call: move the tensors, but never round them."""
        unrounded = {
            path: tensor.detach().clone()
            for path, tensor in self._own_tensors()
            if tensor.dtype in (torch.float32, torch.float64)
        }
        super()._apply(fn, recurse)
        for path, tensor in self._own_tensors():
            if path in unrounded and tensor.dtype in HALF:
                tensor.data = unrounded[path].to(tensor.device)
        return self


def within(x: Tensor, low: float, high: float) -> Tensor:
    """x held in [low, high] in the forward pass; the gradient passes, so a value can come back."""
    if (low, high) == UNBOUNDED:
        return x
    zero_with_gradient = x - x.detach()  # added last, so that the bound is met exactly
    return x.detach().clamp(low, high) + zero_with_gradient


def at_least(x: Tensor, low: float) -> Tensor:
    """x, or `low` where x is smaller, in the forward pass; the gradient passes."""
    return within(x, low, math.inf)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.float() if x.dtype in HALF else x


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast rounds nothing on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
