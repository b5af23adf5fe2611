"""The first use of a compiled backend: a small case of the same kind must give what the definition gives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.attention.eager import eager
from megatron.errors import UserError

FEW = 70  # queries at most, where there are fewer than keys
PARTS = ("bias", "weight", "window", "chunk", "segments")
# Relative to the definition in float64; rounding stays below a quarter of these, a wrong mask or distance far above.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Kind:
    """What may make a difference to a compiler, and the sizes that stand for all of the same kind.

    gradients: of q, k and v together, of bias, of weight
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    gradients: tuple[bool, bool, bool]
    bias: bool
    weight: bool
    window: int | None
    chunk: int | None
    segments: bool

    def __str__(self) -> str:
        parts = [part for part in PARTS if getattr(self, part)]
        learned = ", with gradients" if any(self.gradients) else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.device.type} ({dtype}, head_dim {self.head_dim}, {' and '.join(parts) or 'no table'}{learned})"


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
) -> None:
    """UserError if `backend` errs on its first use for inputs of this kind; nothing is done at later uses."""
    keys = _alike(k.shape[2], 200)  # no multiple of a kernel's blocks
    queries = keys if q.shape[2] == k.shape[2] else min(q.shape[2], FEW)
    wanted = [(q, k, v), (bias,), (weight,)]
    learned = [
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in group)
        for group in wanted
    ]
    kind = Kind(
        q.device,
        q.dtype,
        min(q.shape[0], 2),
        _alike(q.shape[1], 2),
        queries,
        keys,
        q.shape[3],
        (learned[0], learned[1], learned[2]),
        bias is not None,
        weight is not None,
        None if window is None else _alike(window, 60),
        None if chunk is None else _alike(chunk, 50),
        segments is not None,
    )
    if (backend, kind) in _passed:
        return
    # A thread of its own has no autocast, inference mode, hooks of checkpointing or other state of the caller.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compare, name, backend, kind).result()
    _passed.add((backend, kind))


def _alike(size: int, few: int) -> int:
    """A small size for which Triton makes the same program: it has one each for 1, multiples of 16, and others."""
    return 1 if size == 1 else -(-few // 16) * 16 if size % 16 == 0 else few


def _compare(name: str, backend: Callable[..., Tensor], kind: Kind) -> None:
    mend = "choose attention_backend: sdpa"
    if kind.device.type == "cuda":
        torch.cuda.set_device(kind.device)  # a fresh thread stands at the first
    try:
        found = _results(backend, kind, kind.dtype)
    except Exception as error:
        raise UserError(
            f"attention_backend: {name} fails on {kind}: {_first_line(error)} - {mend}"
        ) from error
    for (what, ours), exact in zip(
        found.items(), _results(eager, kind, torch.float64).values(), strict=True
    ):
        difference = ours.double() - exact
        error = float(difference.norm() / exact.norm())
        if not error <= TOLERANCE.get(kind.dtype, 0.0):  # NaN is an error too
            raise UserError(
                f"attention_backend: {name} is wrong on {kind}: its {what} differs from the definition by"
                f" {error:.1%}, at most {float(difference.abs().max()):.2g} - {mend}, or trust it all the same with"
                " attention_self_check: false"
            )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _results(backend: Callable[..., Tensor], kind: Kind, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and the gradients that are wanted, of the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(0)  # the global generators stay as they are
    length = {"q": kind.queries, "k": kind.keys, "v": kind.keys}
    shapes = {x: (kind.batch, kind.heads, n, kind.head_dim) for x, n in length.items()}
    given = {x: torch.randn(shape, generator=draw).to(kind.dtype) for x, shape in shapes.items()}
    given |= {
        x: torch.randn(kind.heads, kind.keys, generator=draw)
        for x in ("bias", "weight")
        if getattr(kind, x)
    }
    narrow = dtype if dtype == torch.float64 else None
    of_q, of_bias, of_weight = kind.gradients
    learned = {"q": of_q, "k": of_q, "v": of_q, "bias": of_bias, "weight": of_weight}
    leaves = {
        x: value.to(kind.device, narrow).requires_grad_(learned[x]) for x, value in given.items()
    }
    out = backend(
        *(leaves.get(x) for x in ("q", "k", "v", "bias")),
        weight=leaves.get("weight"),
        window=kind.window,
        chunk=kind.chunk,
        segments=(torch.arange(kind.keys, device=kind.device) // 90).expand(kind.batch, -1)
        if kind.segments
        else None,
        index_bias=None,
    )
    wanted = [x for x in leaves if learned[x]]
    onto = torch.randn(out.shape, generator=draw).to(out)
    gradients = torch.autograd.grad(out, [leaves[x] for x in wanted], onto) if wanted else ()
    return {"output": out.detach()} | {
        f"gradient of {x}": g for x, g in zip(wanted, gradients, strict=True)
    }
