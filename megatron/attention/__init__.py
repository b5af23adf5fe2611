"""The one attention of the project, causal with a bias by head and distance, and the choice of its backend."""

from collections.abc import Callable

from torch import Tensor

from megatron.attention.eager import eager
from megatron.attention.sdpa import sdpa
from megatron.errors import UserError

BACKENDS: dict[str, Callable[..., Tensor]] = {"eager": eager, "sdpa": sdpa}
"""What `attention_backend` may name, beside auto."""

IndexBias = Callable[[Tensor, Tensor], Tensor]
OnScores = Callable[[Tensor], Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    segments: Tensor | None = None,
    index_bias: IndexBias | None = None,
    on_scores: OnScores | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention with a bias that depends on head and distance.

    q [batch, heads, queries, head_dim] are the last `queries` of the keys' positions;
    k, v [batch, heads, keys, head_dim];
    bias [heads, >= keys] float32: bias[h, d] is added to q·k/√head_dim where the key stands d tokens back;
    weight, same shape: multiplies q·k/√head_dim before the bias (KERPLE's weight kernels only);
    window: a query sees the last `window` keys up to its own; keys further back are out of sight;
    chunk: a query sees its own chunk of that many keys and the one before (blockwise causal attention, xPos);
    segments [batch, keys] int: a query sees only keys of its own document;
    index_bias(indices [queries], indices [keys]) -> [heads, queries, keys]: added, for a bias that depends on the
    indices themselves; on_scores [batch, heads, queries, keys] -> same: after all biases, where content decides.
    Returns [batch, heads, queries, head_dim] in q's dtype. ValueError where shapes disagree or the backend refuses.
    """
    _check(q, k, v, {"bias": bias, "weight": weight}, {"window": window, "chunk": chunk}, segments)
    more = {"weight": weight, "window": window, "chunk": chunk, "segments": segments, "index_bias": index_bias}
    if on_scores is not None:
        more["on_scores"] = on_scores
    return BACKENDS[resolve(backend, content=on_scores is not None)](q, k, v, bias, **more)


def resolve(backend: str, *, content: bool = False) -> str:
    """The backend that `auto` stands for, or `backend` itself; UserError for an unknown name.

    content: whether scores are rewritten by an encoding that looks at content, which eager alone computes
    """
    if backend == "auto":
        return "eager" if content else "sdpa"
    if backend not in BACKENDS:
        raise UserError(f"attention_backend: {backend!r} is not known; choose from auto, {', '.join(BACKENDS)}")
    if content and backend != "eager":
        raise UserError(f"attention_backend: {backend} cannot compute an encoding that looks at content; choose eager")
    return backend


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: dict[str, Tensor | None],
    reaches: dict[str, int | None],
    segments: Tensor | None,
) -> None:
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] > k.shape[2]:
        raise ValueError(f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    heads, keys = k.shape[1], k.shape[2]
    for name, table in tables.items():
        if table is not None and (table.dim() != 2 or table.shape[0] != heads or table.shape[1] < keys):
            raise ValueError(f"attention: {name} {list(table.shape)} must be [{heads}, at least {keys}]")
    for name, reach in reaches.items():
        if reach is not None and reach < 1:
            raise UserError(f"{name}: {reach} must be at least 1, or left out")
    if segments is not None and segments.shape != (k.shape[0], keys):
        raise ValueError(f"attention: segments {list(segments.shape)} must be {[k.shape[0], keys]}")
