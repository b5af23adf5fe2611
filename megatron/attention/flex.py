"""Torch's flex_attention as a backend of ours, and our encodings for models that call it."""

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megatron.attention.terms import Content, Terms, check_lengths, first_visible
from megatron.attention.triton_passes import blocks_of, document_bounds
from megatron.errors import UserError

BLOCK = 128
"""Queries, and keys, of a block that is computed or skipped as a whole: torch's default."""
MOST_PROGRAMS = 64
"""Compiled programs of one function, where torch's limit is 8: one for each length and kind."""

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
    block_mask: of an earlier call with the same window, chunk and segments, in place of a new one.

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
    check_applied(fault, encoding, CALLS, applied)
    by_content = encoding.has("score_bias")
    if by_content and (x is None or x.shape[1] != length):
        raise UserError(
            f"{fault} it reads content; give the input of the layer's attention,"
            f" x [batch, {length}, hidden]"
        )
    check_lengths(window=window, chunk=chunk)
    if segments is not None:
        encoding.check_documents(restart=False)

    index = torch.arange(length, device=encoding.origin.device)
    index_bias = encoding.index_bias(index, index) if encoding.has("index_bias") else None
    terms = Terms(
        encoding.distance_bias(length),
        encoding.distance_weight(length),
        window,
        chunk,
        segments,
        content=Content.of(encoding.score_bias(x, {}), length) if by_content else None,
    )
    score_mod, visible = modifiers(terms, 0, index_bias)
    if block_mask is None:
        block_mask = blocks_of_mask(visible, terms, index, length)
    return score_mod, block_mask


def check_applied(
    fault: str, encoding: Any, hooks: Collection[str], applied: Collection[str]
) -> None:
    """Raises UserError, which begins with `fault`, for hooks of CALLS that the model leaves out."""
    missing = [hook for hook in hooks if encoding.has(hook) and hook not in applied]
    if missing:
        calls = "; ".join(CALLS[hook] for hook in missing)
        raise UserError(
            f"{fault} it acts before attention too; call {calls}; then add applied={missing}"
        )


def modifiers(
    terms: Terms, before: int, index_bias: Tensor | None = None
) -> tuple[Callable, Callable]:
    """score_mod and mask_mod of terms, for queries whose first one has the index `before`.

    index_bias [heads, queries, keys]
    """
    bias, weight, segments = terms.bias, terms.weight, terms.segments
    gain, content = None, []
    if terms.content is not None:
        # Sums over a text reach 10⁵, where float32 has two digits after the point: w is near +
        # rest. Compiled gradients reach a tensor that is read once: a query's own w is another.
        for w in (terms.content.w[..., 0], -terms.content.own_w[..., 0]):
            near = w.float()
            content += [near, (w - near).detach().float()]
        if terms.content.u is not None:
            gain = terms.content.u[..., 0]

    def score_mod(score, b, h, query, key):
        distance = (query + before - key).clamp(min=0)  # later keys are masked
        if weight is not None:
            score = score * weight[h, distance]
        if bias is not None:
            score = score + bias[h, distance]
        if index_bias is not None:
            score = score + index_bias[h, query, key]
        if content:
            near, rest, minus_own, minus_own_rest = content
            added = near[b, h, key] + minus_own[b, h, query]
            added = added + (rest[b, h, key] + minus_own_rest[b, h, query])
            score = score + (added if gain is None else gain[b, h, query] * added)
        return score

    def visible(b, h, query, key):
        place = query + before
        seen = (key <= place) & (key >= first_visible(place, terms.window, terms.chunk))
        return seen if segments is None else seen & (segments[b, place] == segments[b, key])

    return score_mod, visible


def blocks_of_mask(visible: Callable, terms: Terms, query: Tensor, keys: int) -> BlockMask:
    """The blocks of keys that blocks of queries see. query [queries]: indices, up to the last key.

    They are those from the first key that one of the queries sees to the queries' own. In each of
    them torch asks `visible` about all pairs while it computes. Its own `create_block_mask` asks
    before, which takes gigabytes at 16384 tokens.
    """
    first = first_visible(query, terms.window, terms.chunk)[None]  # [batch or 1, queries]
    if terms.segments is not None:
        begin, _ = document_bounds(terms.segments.contiguous())
        first = first.maximum(begin[:, query])
    first = F.pad(first, (0, -len(query) % BLOCK), value=keys).unflatten(1, (-1, BLOCK))
    first_block = first.amin(2, keepdim=True) // BLOCK  # [batch or 1, blocks of queries, 1]
    own_block = (query[::BLOCK, None] + BLOCK - 1).clamp(max=keys - 1) // BLOCK
    block = torch.arange(blocks_of(keys, BLOCK), device=query.device)
    order = (first_block + block) % len(block)
    count = (own_block + 1 - first_block).squeeze(-1)
    lists = (x[:, None].int() for x in (count, order))  # the same for all heads
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(len(query), keys)
    )


@cache
def _compiled(device: str) -> Callable:
    torch._dynamo.config.recompile_limit = MOST_PROGRAMS
    # On a CPU torch compiles no lse, and what it compiles is slower than sdpa: there all scores
    # exist at once.
    backend = "eager" if device == "cpu" else "inductor"
    return torch.compile(flex_attention, backend=backend, fullgraph=True, dynamic=False)


def flex_backend(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """See megatron.attention.attention.

    One program is compiled for each length and kind of input; new tables need no other.
    """
    keys, before = k.shape[2], k.shape[2] - q.shape[2]
    score_mod, visible = modifiers(terms, before)
    mask = blocks_of_mask(visible, terms, torch.arange(before, keys, device=q.device), keys)
    run = flex_attention if torch.compiler.is_compiling() else _compiled(q.device.type)
    out, extra = run(q, k, v, score_mod, mask, return_aux=AuxRequest(lse=terms.needs_lse))
    return out, extra.lse
