"""The check of a compiled backend at its first use: a small case must agree with the definition."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.attention.eager import eager
from megatron.attention.terms import Content, Terms
from megatron.errors import UserError

SMALL = 0.03
"""Root mean square below which a value counts as this: inputs have 1, most gradients 0.1 to 5.

If the true gradient is zero, rounding leaves up to 3e-6 in float32.
"""
# Relative to the definition in float64. Rounding errors stay below a quarter of these; a wrong
# mask or distance is far above.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


NAMES = ("q", "k", "v", "bias", "weight", "u", "w")


class Kind(NamedTuple):
    """Facts that may change the compiled program, with small sizes in place of the true ones.

    tensors: name, shape and dtype of each that is present, q first; learned: those with a gradient
    """

    device: torch.device
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    learned: frozenset[str]
    window: int | None
    chunk: int | None
    segments: bool

    def __str__(self) -> str:
        _, shape, dtype = self.tensors[0]
        options = [name for name, _, _ in self.tensors[3:]]
        for term in ("window", "chunk", "segments"):
            if getattr(self, term):
                options.append(term)
        words = [
            str(dtype).removeprefix("torch."),
            f"head_dim {shape[3]}",
            " and ".join(options) or "no table",
        ]
        if self.learned:
            words.append("with gradients")
        return f"{self.device.type} ({', '.join(words)})"


_passed: set[tuple[Callable[..., Any], Kind]] = set()


def check(name: str, backend: Callable[..., Any], *tensors: Tensor, terms: Terms) -> None:
    """Compare a backend with the definition at its first use for inputs of this kind.

    tensors: q, k, v. UserError if it is wrong or fails. Later uses cost nothing.
    """
    everything = zip(NAMES, (*tensors, *terms.tensors[:4]), strict=True)
    present = {key: tensor for key, tensor in everything if tensor is not None}
    q, k, _ = tensors
    heads = _small_size(q.shape[1], 2)
    keys = _small_size(k.shape[2], 200)  # no multiple of a kernel's blocks
    queries = keys if q.shape[2] == k.shape[2] else min(q.shape[2], 70)
    small = []
    for key, tensor in present.items():
        shape = (min(q.shape[0], 2), heads, queries if key in ("q", "u") else keys)
        if key in ("bias", "weight"):
            shape = (heads, keys)
        small.append((key, (*shape, *tensor.shape[3:]), tensor.dtype))
    learned = {key for key, tensor in present.items() if tensor.requires_grad}
    for together in ({"q", "k", "v"}, {"u", "w"}):  # one program computes their gradients
        if learned & together:
            learned |= together & present.keys()
    kind = Kind(
        device=q.device,
        tensors=tuple(small),
        learned=frozenset(learned if torch.is_grad_enabled() else ()),
        window=None if terms.window is None else _small_size(terms.window, 60),
        chunk=None if terms.chunk is None else _small_size(terms.chunk, 50),
        segments=terms.segments is not None,
    )
    if (backend, kind) in _passed:
        return
    # A fresh thread has none of the caller's state: autocast, inference mode, checkpointing hooks.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compare, name, backend, kind).result()
    _passed.add((backend, kind))


def _small_size(size: int, small: int) -> int:
    """A size near `small` for which Triton compiles the same program as for `size`.

    It compiles one program each for 1, for multiples of 16, and for other sizes.
    """
    if size == 1:
        return 1
    return small if size % 16 else math.ceil(small / 16) * 16


def _compare(name: str, backend: Callable[..., Any], kind: Kind) -> None:
    cure = "choose attention_backend: sdpa"
    if kind.device.type == "cuda":
        torch.cuda.set_device(kind.device)  # a fresh thread starts on the first device
    try:
        results = _results(backend, kind)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"attention_backend: {name} fails on {kind}: {type(error).__name__}: {first_line} -"
            f" {cure}"
        ) from error
    for quantity, exact in _results(eager, kind, torch.float64).items():
        difference = results[quantity].double() - exact
        # A true gradient may be zero, as with a window of one key, where every kernel rounds.
        scale = max(float(exact.norm()), SMALL * math.sqrt(exact.numel()))
        error = float(difference.norm()) / scale
        if not error <= TOLERANCE.get(kind.tensors[0][2], 0.0):  # NaN is an error too
            largest = float(difference.abs().max())
            raise UserError(
                f"attention_backend: {name} is wrong on {kind}: its {quantity} differs from the"
                f" definition by {error:.1%}, at most {largest:.2g} - {cure}, or trust it all the"
                " same with attention_self_check: false"
            )


def _results(
    backend: Callable[..., Any], kind: Kind, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output, lse and the gradients that are wanted, from the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(0)  # the global generators stay as they are
    leaves: dict[str, Any] = dict.fromkeys(NAMES)
    for name, shape, dtype_of_tensor in kind.tensors:
        numbers = torch.randn(shape, generator=draw)
        if name == "w":
            numbers = 0.3 * numbers.cumsum(2)
        numbers = numbers.to(dtype_of_tensor).to(kind.device, dtype)
        leaves[name] = numbers.requires_grad_(name in kind.learned)
    q, k, v, bias, weight, u, w = leaves.values()
    segments = None
    if kind.segments:
        index = torch.arange(k.shape[2], device=kind.device)
        segments = (index // 90).expand(k.shape[0], -1)
    content = None if w is None else Content.of((u, w), q.shape[2])
    masks = {"window": kind.window, "chunk": kind.chunk, "segments": segments}
    out, lse = backend(q, k, v, Terms(bias, weight, content=content, needs_lse=True, **masks))

    results = {"output": out.detach(), "lse": lse.detach()}
    learned = [name for name in leaves if name in kind.learned]
    dout, dlse = (torch.randn(x.shape, generator=draw).to(x) for x in (out, lse))
    if learned:
        gradients = torch.autograd.grad(
            (out, lse), [leaves[name] for name in learned], (dout, dlse)
        )
        for name, gradient in zip(learned, gradients, strict=True):
            results[f"gradient of {name}"] = gradient
    return results
