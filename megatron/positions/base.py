"""What every positional encoding is made of: the hooks and the float32 rule."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes that an encoding may depend on."""

    heads: int
    head_dim: int
    hidden: int
    train_length: int


class Position(nn.Module):
    """A positional encoding: any of seven optional hooks. Its numbers stay float32 whatever the model's dtype.

    `per_layer` says that every layer needs parameters of its own, whatever `pos_emb_shared` is.
    `claims` may hold "zero_at_0" and "never_rises": tools/check_encoding.py then holds its bias to them.
    `bounds` names the learned parameters that live in an interval; `bounded` and `learned` give their effective values.
    `reference_names` says under which name the GPT-NeoX forks keep a parameter or fixed tensor of ours in checkpoints;
    `reference_unused` lists tensors that they store without using them.
    """

    per_layer: bool = False
    claims: ClassVar[tuple[str, ...]] = ()
    bounds: ClassVar[dict[str, tuple[float, float]]] = {}
    reference_names: ClassVar[dict[str, str]] = {}
    reference_unused: ClassVar[tuple[str, ...]] = ()
    origin: Tensor
    drawn: Tensor | None = (
        None  # [length] int64: positions to be used instead of 0, 1, …, as `randomized` draws them
    )

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        # float32 values of parameters that an engine keeps rounded in half precision (training sets them after a step).
        self.exact: dict[str, Tensor] = {}
        # Says on which device, and in float32 or float64, this encoding computes; it holds nothing else.
        self.register_buffer("origin", torch.zeros(()), persistent=False)

    def prepare(self, length: int) -> None:
        """Once per forward pass, before every other hook and never again in a recomputation: the place to draw."""

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

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """For encodings that need the indices of query and key, not just their distance: [queries], [keys] int64
        -> [heads, queries, keys] float32, added to the score. Asked block by block; keys after a query are hidden."""
        raise NotImplementedError

    def on_scores(self, scores: Tensor, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """For encodings that look at content: scaled scores with every bias [batch, heads, queries, keys], where keys
        after a query hold any finite number, and the layer's input x [batch, queries, hidden] -> scores.

        `memory` is this layer's own and lives as long as a cached text; what depends on earlier tokens is kept there.
        Written for Cable, and enough for others: FoX is Cable with log sigmoid for its penalty; DAPE makes its table
        here and adds it and an MLP over heads of scores and table; CoPE needs q too, which a layer of its own
        (per_layer) can keep from on_queries_keys, called just before.
        """
        raise NotImplementedError

    def has(self, hook: str) -> bool:
        """Whether this encoding has a hook of its own: index_bias, on_scores, distance_bias …"""
        return getattr(type(self), hook) is not getattr(Position, hook)

    def distances(self, length: int) -> Tensor:
        """0, 1, …, length - 1: [length] float32, exact up to 2^24."""
        return torch.arange(length, device=self.origin.device).to(self.origin.dtype)

    def indices(self, start: int, length: int) -> Tensor:
        """Positions of `length` tokens from `start` on: [length] float32."""
        if self.drawn is not None:
            return self.drawn[start : start + length].to(self.origin.dtype)
        return start + self.distances(length)

    def table(self, function: Callable[[Tensor], Tensor], length: int) -> Tensor:
        """`function` of the distances 0 … length - 1 outside autocast: -> [heads, length] float32."""
        distance = self.distances(length)
        with torch.autocast(distance.device.type, enabled=False):
            table = self.in_float32(function, distance)
        expected = (self.shape.heads, length)
        if tuple(table.shape) != expected or table.dtype != distance.dtype:
            raise TypeError(
                f"{type(self).__name__}: a kernel must give {list(expected)} {distance.dtype},"
                f" not {list(table.shape)} {table.dtype}"
            )
        return table

    def in_float32(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function` of the inputs with the parameters of modules in this encoding in float32 although an engine may
        have rounded them, as `bounded` does for its own; gradients reach them."""
        paths = {id(module): f"{path}." if path else "" for path, module in self.named_modules()}
        rounded = {
            paths[id(module)] + name: module.bounded_to(name, -math.inf, math.inf)
            for module, name, value in self.own_parameters()
            if "." in name and value.dtype in (torch.bfloat16, torch.float16)
        }
        return (
            torch.func.functional_call(self, rounded, (function, *inputs))
            if rounded
            else function(*inputs)
        )

    def forward(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What `in_float32` runs while other values stand in for the parameters."""
        return function(*inputs)

    def log_n_scale(self, start: int, length: int) -> Tensor:
        """max(1, log n / log train_length) for a query that sees n tokens: [length] float32 (log-n attention scaling,
        Su Jianlin 2021, kexue.fm/archives/8823, in its form without training)."""
        seen = start + self.distances(length) + 1
        return (seen.log() / math.log(self.shape.train_length)).clamp(min=1.0)

    def bounded(self, name: str) -> Tensor:
        """The parameter `name` as it acts: within its bounds, and in float32 although an engine may have rounded it."""
        return self.bounded_to(name, *self.bounds.get(name, (-math.inf, math.inf)))

    def bounded_to(self, name: str, low: float, high: float) -> Tensor:
        """The same within other bounds; `name` may be a path into a module of this encoding."""
        value = at_least_float32(self.get_parameter(name) if "." in name else getattr(self, name))
        if name in self.exact:
            value = value + (self.exact[name] - value).detach()
        return within(value, low, high)

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
        """(encoding, name, parameter) of this encoding and of those that it is made of; a name may be a path into a
        module that is no encoding."""
        for encoding in self.modules():
            if isinstance(encoding, Position):
                for path, module in encoding._own_modules():
                    for name, value in module.named_parameters(recurse=False):
                        yield encoding, f"{path}.{name}".lstrip("."), value

    def _own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of this encoding and of what is in it, but not of other encodings."""
        waiting: list[tuple[str, nn.Module]] = [("", self)]
        while waiting:
            path, module = waiting.pop(0)
            yield path, module
            waiting += [
                (f"{path}.{name}".lstrip("."), child)
                for name, child in module.named_children()
                if not isinstance(child, Position)
            ]

    def reference(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs (name in the forks' checkpoints, our tensor): parameters are to be loaded, buffers to be compared."""
        for module in self.modules():
            if isinstance(module, Position):
                yield from (
                    (theirs, getattr(module, ours))
                    for ours, theirs in module.reference_names.items()
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Position":
        """Move as told but never round: `.bfloat16()` on these few numbers would spoil every far distance."""
        before = {
            name: tensor
            for name, tensor in self._own_tensors()
            if tensor.dtype in (torch.float32, torch.float64)
        }
        before = {name: tensor.detach().clone() for name, tensor in before.items()}
        super()._apply(fn, recurse)
        for name, tensor in self._own_tensors():
            if name in before and tensor.dtype in (torch.bfloat16, torch.float16):
                tensor.data = before[name].to(tensor.device)
        return self

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._own_modules():
            yield from (
                (f"{path}.{name}", value) for name, value in module.named_parameters(recurse=False)
            )
            yield from (
                (f"{path}.{name}", value) for name, value in module.named_buffers(recurse=False)
            )


class DistanceBias(Position):
    """An encoding that is one function of the distance; families write `log_kernel` only."""

    def log_kernel(self, distance: Tensor) -> Tensor:
        """What is added to the scaled score: [length] float32 -> [heads, length] float32."""
        raise NotImplementedError

    def distance_bias(self, length: int) -> Tensor:
        return self.table(self.log_kernel, length)


def within(x: Tensor, low: float, high: float) -> Tensor:
    """x held in [low, high] in the forward pass; the gradient passes, so a value outside can come back."""
    if low == -math.inf and high == math.inf:
        return x
    return x.detach().clamp(low, high) + (
        x - x.detach()
    )  # 0 is added, so that the bound is met exactly


def at_least(x: Tensor, low: float) -> Tensor:
    """x, or `low` where x is smaller, in the forward pass; the gradient passes."""
    return within(x, low, math.inf)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
