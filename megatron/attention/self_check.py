"""The check of a compiled backend at its first use: a small case must agree with the definition."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.attention.eager import eager
from megatron.attention.terms import Content, Terms
from megatron.errors import in_words

SMALL = 0.03
"""Root mean square below which a value counts as this: inputs have 1, most gradients 0.1 to 5.

If the true gradient is zero, rounding leaves up to 3e-6 in float32.
"""
# Relative to the definition in float64. Rounding errors stay below a quarter of these; a wrong
# mask or distance is far above.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
NAMES = ("q", "k", "v", "bias", "weight", "u", "w")
KEYS = 200  # no multiple of a kernel's blocks


class Small(NamedTuple):
    """A small tensor in the place of one that a backend was given."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    learned: bool


class Kind(NamedTuple):
    """Facts that may change the compiled program."""

    device: torch.device
    tensors: tuple[Small, ...]
    window: int | None
    segments: bool

    def __str__(self) -> str:
        q, _, _, *others = self.tensors
        options = [x.name for x in others]
        options += [name for name in ("window", "segments") if getattr(self, name)]
        words = [str(q.dtype).removeprefix("torch."), f"head_dim {q.shape[3]}"]
        words.append(" and ".join(options) or "no table")
        if any(x.learned for x in self.tensors):
            words.append("with gradients")
        return f"{self.device.type} ({', '.join(words)})"


def fault_of(backend: Callable[..., Any], *tensors: Tensor, terms: Terms) -> str | None:
    """What is wrong with a backend for inputs of this kind, such as "fails on …", or None.

    tensors: q, k, v. It is compared with the definition at its first use; later uses cost nothing.
    """
    q, k, _ = tensors
    keys = _small_size(k.shape[2], KEYS)
    sizes = {q.shape[2]: min(q.shape[2], 70), k.shape[2]: keys}
    small = []
    for key, x in zip(NAMES, (*tensors, *terms.tensors[:4]), strict=True):
        if x is None:
            continue
        if key in ("bias", "weight"):
            shape: tuple[int, ...] = (_small_size(x.shape[0], 2), keys)
        else:
            batch, heads, length, *features = x.shape
            shape = (min(batch, 2), _small_size(heads, 2), sizes[length], *features)
        small.append(Small(key, shape, x.dtype, x.requires_grad and torch.is_grad_enabled()))
    window = None if terms.window is None else _small_size(terms.window, 60)
    kind = Kind(q.device, tuple(small), window, terms.segments is not None)
    return _fault(backend, kind)


def _small_size(size: int, small: int) -> int:
    """A size near `small` for which Triton compiles the same program as for `size`.

    It compiles one program each for 1, for multiples of 16, and for other sizes.
    """
    if size == 1:
        return 1
    return small if size % 16 else math.ceil(small / 16) * 16


@cache
def _fault(backend: Callable[..., Any], kind: Kind) -> str | None:
    # A fresh thread has none of the caller's state: autocast, inference mode, checkpointing hooks.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compare, backend, kind).result()


def _compare(backend: Callable[..., Any], kind: Kind) -> str | None:
    if kind.device.type == "cuda":
        torch.cuda.set_device(kind.device)  # a fresh thread starts on the first device
    try:
        results = _results(backend, kind)
    except Exception as error:
        return f"fails on {kind}: {type(error).__name__}: {in_words(error)}"
    dtype = results["output"].dtype
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16  # TF32 has as few digits
    tolerance = TOLERANCE.get(dtype, 0.0)
    for quantity, exact in _results(eager, kind, torch.float64).items():
        difference = results[quantity].double() - exact
        # A true gradient may be zero, as with a window of one key, where every kernel rounds.
        scale = max(float(exact.norm()), SMALL * math.sqrt(exact.numel()))
        error = float(difference.norm()) / scale
        if not error <= tolerance:  # NaN is an error too
            return f"is wrong on {kind}: its {quantity} differs from the definition by {error:.1%}"
    return None


def _results(
    backend: Callable[..., Any], kind: Kind, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output, lse and the gradients that are wanted, from the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(0)  # the global generators stay as they are
    leaves: dict[str, Any] = dict.fromkeys(NAMES)
    for small in kind.tensors:
        numbers = torch.randn(small.shape, generator=draw).to(small.dtype)
        leaves[small.name] = numbers.to(kind.device, dtype).requires_grad_(small.learned)
    q, k, v, bias, weight, u, w = leaves.values()
    segments = None
    if kind.segments:
        index = torch.arange(k.shape[2], device=kind.device)
        segments = (index // 90).expand(k.shape[0], -1)
    content = None if w is None else Content.of((u, w), q.shape[2])
    terms = Terms(bias, weight, kind.window, segments=segments, content=content, needs_lse=True)
    out, lse = backend(q, k, v, terms)

    if out.requires_grad:
        downs = [torch.randn(x.shape, generator=draw).to(x) for x in (out, lse)]
        torch.autograd.backward((out, lse), downs)
    results = {"output": out.detach(), "lse": lse.detach()}
    for small in kind.tensors:
        if small.learned:
            results[f"gradient of {small.name}"] = leaves[small.name].grad
    return results
