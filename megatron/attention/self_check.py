"""The check of a compiled backend at its first use: a small case must agree with the definition."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.attention.eager import ScoreBias, eager
from megatron.errors import UserError

FEW_QUERIES = 70  # where there are fewer queries than keys
SMALL = 0.03
"""Root mean square below which a value counts as this: inputs have 1, most gradients 0.1 to 5.

Where the true gradient is zero, rounding leaves up to 3e-6 in float32.
"""
OPTIONS = ("bias", "weight", "window", "chunk", "segments", "u", "w")
# Relative to the definition in float64. Rounding errors stay below a quarter of these; a wrong
# mask or distance is far above.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Kind:
    """What may change the compiled program, with small sizes in place of the true ones.

    gradients: whether those of q, k and v together, of bias, of weight, and of u and w together are
    wanted; u: a bias by content has one; w: the dtype of its other factor, None without such a bias
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    gradients: tuple[bool, bool, bool, bool]
    bias: bool
    weight: bool
    window: int | None
    chunk: int | None
    segments: bool
    u: bool
    w: torch.dtype | None

    def __str__(self) -> str:
        options = [option for option in OPTIONS if getattr(self, option)]
        tables = " and ".join(options) or "no table"
        if any(self.gradients):
            tables += ", with gradients"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.device.type} ({dtype}, head_dim {self.head_dim}, {tables})"


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
    kind = _kind_of(q, k, v, bias, weight, window, chunk, segments, score_bias)
    if (backend, kind) in _passed:
        return
    # A fresh thread has none of the caller's state: autocast, inference mode, checkpointing hooks.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compare, name, backend, kind).result()
    _passed.add((backend, kind))


def _kind_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int | None,
    chunk: int | None,
    segments: Tensor | None,
    score_bias: ScoreBias | None,
) -> Kind:
    u, w = (None, None) if score_bias is None else (score_bias.u, score_bias.w)
    keys = _small_size(k.shape[2], 200)  # no multiple of a kernel's blocks
    queries = keys
    if q.shape[2] != k.shape[2]:
        queries = min(q.shape[2], FEW_QUERIES)
    return Kind(
        device=q.device,
        dtype=q.dtype,
        batch=min(q.shape[0], 2),
        heads=_small_size(q.shape[1], 2),
        queries=queries,
        keys=keys,
        head_dim=q.shape[3],
        gradients=(_learns(q, k, v), _learns(bias), _learns(weight), _learns(u, w)),
        bias=bias is not None,
        weight=weight is not None,
        window=None if window is None else _small_size(window, 60),
        chunk=None if chunk is None else _small_size(chunk, 50),
        segments=segments is not None,
        u=u is not None,
        w=None if w is None else w.dtype,
    )


def _learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient of any of them is wanted."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _small_size(size: int, small: int) -> int:
    """A size near `small` for which Triton compiles the same program as for `size`.

    It compiles one program each for 1, for multiples of 16, and for other sizes.
    """
    if size == 1:
        return 1
    if size % 16 == 0:
        return math.ceil(small / 16) * 16
    return small


def _compare(name: str, backend: Callable[..., Tensor], kind: Kind) -> None:
    cure = "choose attention_backend: sdpa"
    if kind.device.type == "cuda":
        torch.cuda.set_device(kind.device)  # a fresh thread starts on the first device
    try:
        results = _results(backend, kind, kind.dtype)
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


def _results(backend: Callable[..., Tensor], kind: Kind, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and the gradients that are wanted, computed from the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(0)  # the global generators stay as they are
    inputs = {}
    for name, length in {"q": kind.queries, "k": kind.keys, "v": kind.keys}.items():
        shape = (kind.batch, kind.heads, length, kind.head_dim)
        inputs[name] = torch.randn(shape, generator=draw).to(kind.dtype)
    for name, exists in {"bias": kind.bias, "weight": kind.weight}.items():
        if exists:
            inputs[name] = torch.randn(kind.heads, kind.keys, generator=draw)
    if kind.u:
        inputs["u"] = torch.randn(kind.batch, kind.heads, kind.queries, generator=draw)
    if kind.w is not None:
        steps = torch.randn(kind.batch, kind.heads, kind.keys, generator=draw).to(kind.w)
        inputs["w"] = 0.3 * steps.cumsum(2)

    of_qkv, of_bias, of_weight, of_content = kind.gradients
    learns = dict.fromkeys("qkv", of_qkv) | dict.fromkeys("uw", of_content)
    learns |= {"bias": of_bias, "weight": of_weight}
    exact_dtype = dtype if dtype == torch.float64 else None
    leaves = {}
    for name, value in inputs.items():
        leaves[name] = value.to(kind.device, exact_dtype).requires_grad_(learns[name])
    segments = None
    if kind.segments:
        segments = (torch.arange(kind.keys, device=kind.device) // 90).expand(kind.batch, -1)
    options: dict[str, Any] = {"window": kind.window, "chunk": kind.chunk, "segments": segments}
    if kind.w is not None:
        options["score_bias"] = ScoreBias.of((leaves.get("u"), leaves["w"]))
    q, k, v, bias, weight = map(leaves.get, ("q", "k", "v", "bias", "weight"))
    out = backend(q, k, v, bias, weight=weight, index_bias=None, **options)

    results = {"output": out.detach()}
    wanted = {name: leaf for name, leaf in leaves.items() if learns[name]}
    dout = torch.randn(out.shape, generator=draw).to(out)
    if wanted:
        gradients = torch.autograd.grad(out, list(wanted.values()), dout)
        for name, gradient in zip(wanted, gradients, strict=True):
            results[f"gradient of {name}"] = gradient
    return results
