"""Encodings for torch's flex_attention: what they add to scores, and which keys are masked."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from megatron.attention.terms import check_lengths, first_visible
from megatron.errors import UserError

CALLS = {
    "prepare": "encoding.prepare(length) once per pass, before all else",
    "on_embeddings": "x = encoding.on_embeddings(x) once, before the first layer",
    "on_embeddings_by_ids": "x = encoding.on_embeddings_by_ids(x, ids, {}) then",
    "on_queries_keys": "q, k = encoding.on_queries_keys(q, k) in each layer",
    "on_queries_keys_by_content": "q, k = encoding.on_queries_keys_by_content(q, k, x, {}) then",
    "score_scale": "q = q * encoding.score_scale(n)[..., None] last, where query i sees n[i] keys",
}
"""How a model calls the hooks that act before attention."""


def flex(
    encoding: Any,
    length: int,
    *,
    x: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    segments: Tensor | None = None,
    applied: Collection[str] = (),
    block_mask: BlockMask | None = None,
) -> tuple[Callable, BlockMask]:
    """score_mod and block_mask with which flex_attention computes an encoding, causally.

    encoding: of `megatron.positions.build`; layers that share it share the result, within a pass;
    length: of the whole text;
    x [batch, length, hidden]: the input of the layer's attention, for a bias by content;
    window, chunk, segments [batch, length] int: as for `attention`;
    applied: the hooks of CALLS that the model calls itself. No score_mod turns queries and keys,
    so rotary and its like are refused unless they are named;
    block_mask: of an earlier call with the same window, chunk and segments, in place of a new one,
    which takes memory of batch · length² while it is made.

    Gradients reach learned tables and gates by the tensors that score_mod reads. An index_bias
    becomes a table [heads, length, length]. A sink is merged afterwards: see `with_sink`.

    UserError for on_scores, block_scores and a score_bias of rank above one, which no score_mod
    computes, for a hook that is not applied, and for an x that does not fit.
    """
    fault = f"flex: {type(encoding).__name__}:"
    too_much = [hook for hook in ("on_scores", "block_scores") if encoding.has(hook)]
    if encoding.score_rank > 1:
        too_much.append(f"a score_bias of rank {encoding.score_rank}")
    if too_much:
        hooks = " and ".join(too_much)
        raise UserError(f"{fault} no score_mod computes {hooks}; use megatron.attention.attention")
    missing = [hook for hook in CALLS if encoding.has(hook) and hook not in applied]
    if missing:
        calls = "; ".join(CALLS[hook] for hook in missing)
        raise UserError(
            f"{fault} it acts before attention too; call {calls}; then add applied={missing}"
        )
    by_content = encoding.has("score_bias")
    if by_content and (x is None or x.shape[1] != length):
        raise UserError(
            f"{fault} it reads content; give the input of the layer's attention,"
            f" x [batch, {length}, hidden]"
        )
    check_lengths(window=window, chunk=chunk)
    if segments is not None:
        encoding.check_documents(restart=False)

    bias, weight = encoding.distance_bias(length), encoding.distance_weight(length)
    index = torch.arange(length, device=encoding.origin.device)
    index_bias = encoding.index_bias(index, index) if encoding.has("index_bias") else None
    content = None
    if by_content:
        # Sums over a text reach 10⁵, where float32 has two digits after the point: w is near +
        # rest. Compiled gradients reach a tensor that is read once: a query's own w is another.
        gain, w = encoding.score_bias(x, {})
        near = w.float()
        content = gain, near, -near, (w - near).detach().float()

    def score_mod(score, b, h, query, key):
        distance = (query - key).clamp(min=0)  # later keys are masked
        if weight is not None:
            score = score * weight[h, distance]
        if bias is not None:
            score = score + bias[h, distance]
        if index_bias is not None:
            score = score + index_bias[h, query, key]
        if content is not None:
            gain, near, minus_near, rest = content
            added = near[b, h, key] + minus_near[b, h, query]
            added = added + (rest[b, h, key] - rest[b, h, query])
            score = score + (added if gain is None else gain[b, h, query] * added)
        return score

    def visible(b, h, query, key):
        seen = (key <= query) & (key >= first_visible(query, window, chunk))
        return seen if segments is None else seen & (segments[b, query] == segments[b, key])

    if block_mask is None:
        batch = None if segments is None else len(segments)
        block_mask = create_block_mask(visible, batch, None, length, length, index.device)
    return score_mod, block_mask
