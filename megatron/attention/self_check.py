"""The check of a compiled backend at its first use: a small case must agree with the definition."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.attention.eager import ScoreBias, eager
from megatron.errors import UserError

SMALL = 0.03
"""Root mean square below which a value counts as this: inputs have 1, most gradients 0.1 to 5.

If the true gradient is zero, rounding leaves up to 3e-6 in float32.
"""
# Relative to the definition in float64. Rounding errors stay below a quarter of these; a wrong
# mask or distance is far above.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Kind(NamedTuple):
    """What may change the compiled program, with small sizes in place of the true ones.

    tensors: the dtype of each that is present, by name; learned: those that need a gradient
    """

    device: torch.device
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    window: int | None
    chunk: int | None
    segments: bool
    tensors: tuple[tuple[str, torch.dtype], ...]
    learned: frozenset[str]

    @property
    def dtype(self) -> torch.dtype:
        """That of q."""
        return self.tensors[0][1]

    def __str__(self) -> str:
        present = [name for name, _ in self.tensors[3:]]
        masks = {"window": self.window, "chunk": self.chunk, "segments": self.segments}
        options = " and ".join([*present, *(name for name, mask in masks.items() if mask)])
        gradients = ", with gradients" if self.learned else ""
        dtype = str(self.dtype).removeprefix("torch.")
        device = self.device.type
        return f"{device} ({dtype}, head_dim {self.head_dim}, {options or 'no table'}{gradients})"


_passed: set[tuple[Callable[..., Tensor], Kind]] = set()


def check(
    name: str,
    backend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    weight: Tensor | None,
    window: int | None,
    chunk: int | None,
    segments: Tensor | None,
    score_bias: ScoreBias | None = None,
) -> None:
    """Compare a backend with the definition at its first use for inputs of this kind.

    UserError if it is wrong or fails. Later uses cost nothing.
    """
    u, w = (None, None) if score_bias is None else (score_bias.u, score_bias.w)
    given = {"q": q, "k": k, "v": v, "bias": bias, "weight": weight, "u": u, "w": w}
    present = {key: tensor for key, tensor in given.items() if tensor is not None}
    learned = {key for key, tensor in present.items() if tensor.requires_grad}
    for together in ({"q", "k", "v"}, {"u", "w"} & present.keys()):  # one program computes them
        if learned & together:
            learned |= together
    keys = _small_size(k.shape[2], 200)  # no multiple of a kernel's blocks
    kind = Kind(
        device=q.device,
        batch=min(q.shape[0], 2),
        heads=_small_size(q.shape[1], 2),
        queries=keys if q.shape[2] == k.shape[2] else min(q.shape[2], 70),
        keys=keys,
        head_dim=q.shape[3],
        window=None if window is None else _small_size(window, 60),
        chunk=None if chunk is None else _small_size(chunk, 50),
        segments=segments is not None,
        tensors=tuple((key, tensor.dtype) for key, tensor in present.items()),
        learned=frozenset(learned if torch.is_grad_enabled() else ()),
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


def _compare(name: str, backend: Callable[..., Tensor], kind: Kind) -> None:
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
        if not error <= TOLERANCE.get(kind.dtype, 0.0):  # NaN is an error too
            largest = float(difference.abs().max())
            raise UserError(
                f"attention_backend: {name} is wrong on {kind}: its {quantity} differs from the"
                f" definition by {error:.1%}, at most {largest:.2g} - {cure}, or trust it all the"
                " same with attention_self_check: false"
            )


def _results(
    backend: Callable[..., Tensor], kind: Kind, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and the gradients that are wanted, from the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(0)  # the global generators stay as they are
    leaves = {}
    for name, own_dtype in kind.tensors:
        length = kind.queries if name in ("q", "u") else kind.keys
        shape = [kind.batch, kind.heads, length]
        if name in ("bias", "weight"):
            shape = [kind.heads, kind.keys]
        elif name in ("q", "k", "v"):
            shape.append(kind.head_dim)
        numbers = torch.randn(shape, generator=draw)
        if name == "w":
            numbers = 0.3 * numbers.cumsum(2)
        numbers = numbers.to(own_dtype).to(kind.device, dtype)
        leaves[name] = numbers.requires_grad_(name in kind.learned)
    segments = None
    if kind.segments:
        segments = (torch.arange(kind.keys, device=kind.device) // 90).expand(kind.batch, -1)
    options: dict[str, Any] = {"window": kind.window, "chunk": kind.chunk, "segments": segments}
    if "w" in leaves:
        options["score_bias"] = ScoreBias.of((leaves.get("u"), leaves["w"]))
    q, k, v, bias, weight = map(leaves.get, ("q", "k", "v", "bias", "weight"))
    out = backend(q, k, v, bias, weight=weight, index_bias=None, **options)

    results = {"output": out.detach()}
    wanted = [name for name in leaves if name in kind.learned]
    dout = torch.randn(out.shape, generator=draw).to(out)
    if wanted:
        gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], dout)
        for name, gradient in zip(wanted, gradients, strict=True):
            results[f"gradient of {name}"] = gradient
    return results
