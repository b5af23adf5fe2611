"""Attention in blocks of queries, on torch's kernels, with gradients in memory that grows with
length.

Blocks read the distance table in place, so no bias is copied. Keys that no query of the block
attends to are skipped (`scope`), as are those that would get nothing (`first_keys`). Nothing of
size queries · keys ever exists: gradients compute the scores again, block by block, and add up in a
fixed order. A tile is a block of queries and some heads. Its scores are read and written by several
passes, so tiles are as large as a core's cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention.eager import attended
from megatron.attention.first_keys import FirstKeys, first_keys, groups_of_heads
from megatron.attention.scope import BACKWARD_BLOCK, BLOCK, QueryBlock, Scope, of_heads
from megatron.attention.terms import Content, Terms, for_each_query_head, mask, merge, product

MOST_SCORES = 2**23
"""Scores that exist at once where a view of the table is not enough: 32 MiB."""
CACHED_SCORES = 2**18
"""Scores of some heads that a core fills and reads at once: 1 MiB, as its cache. Twice as many took
1.2 times as long at 512."""
# cuDNN's kernel has given NaN gradients under a mask (pytorch#196678).
KERNELS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LARGE_BLOCK = 1024
"""Queries of a block for which torch's kernel is fastest where a bias is by content alone."""
EXACT_SPREAD = 256
"""Up to here, float32 holds a difference with an error of at most 8e-6."""
LEAST_ROWS = 16
Scores = Sequence[Tensor]
"""far_q, far_k and the scores of the block's own keys, as `Position.block_scores` has them."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """See megatron.attention.attention. k and v may have one head for each group of q's.

    Memory grows with length; with an index_bias that learns, with queries · keys.
    """
    queries, keys = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    if terms.window is not None and terms.window >= keys:
        terms = replace(terms, window=None)  # it masks nothing
    added = terms.content is not None or terms.scores is not None
    is_plain = terms.is_causal_alone and not (added or terms.needs_lse) and queries in (1, keys)
    takes_groups = is_plain
    if is_plain and q.device.type == "cuda":  # of torch's kernels, only flash attention does there
        takes_groups = can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, True))
    if not takes_groups:
        k, v = for_each_query_head(k, group), for_each_query_head(v, group)
    if is_plain:
        is_grouped = q.shape[1] != k.shape[1]
        return _fused(q, k, v, is_causal=queries == keys, enable_gqa=is_grouped), None
    # Torch's kernel under autograd is faster than our gradients for a frozen table in half
    # precision: 1.1 times as long as without a bias at 2048 and 4096, ours 1.3 times.
    frozen = terms.bias is None or not terms.bias.requires_grad
    is_masked = terms.segments is not None or terms.chunk is not None
    fused = frozen and terms.weight is None and not is_masked and not added
    fused = fused and not terms.needs_lse and q.dtype in (torch.float16, torch.bfloat16)
    # Only autograd finds the parameters of an index bias.
    if terms.index_bias is not None or fused:
        return tiles(q, k, v, terms, None)
    function, tensors = terms.scores or (None, ())
    rest = replace(terms.with_tensors(), scores=None)
    out, lse = Tiled.apply(rest, function, q, k, v, *terms.tensors, *tensors)
    return out, lse


class Tiled(torch.autograd.Function):
    """`tiles`, without index_bias, whose gradients take memory in proportion to length."""

    @staticmethod
    def forward(
        ctx: Any, terms: Terms, function: Callable | None, *tensors: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, inputs = _rebuilt(terms, function, tensors)
        ctx.terms, ctx.function, ctx.firsts = terms, function, first_keys(q, k, inputs)
        ctx.set_materialize_grads(False)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = tiles(q, k, v, inputs, ctx.firsts)
        ctx.save_for_backward(*tensors, out)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out = ctx.saved_tensors
        wants = ctx.needs_input_grad[2:]
        tensors[8:] = [
            x.detach().requires_grad_(needed)
            for x, needed in zip(tensors[8:], wants[8:], strict=True)
        ]
        q, k, v, inputs = _rebuilt(ctx.terms, ctx.function, tensors)
        dout = torch.zeros_like(out) if dout is None else dout
        numbers = gradients(q, k, v, inputs, ctx.firsts, out, dout, dlse, wants)
        return None, None, *numbers, *(leaf.grad for leaf in tensors[8:])


def _rebuilt(
    terms: Terms, function: Callable | None, tensors: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor, Terms]:
    """q, k, v and the terms from what `Tiled` was given."""
    q, k, v = tensors[:3]
    scores = None if function is None else (function, tensors[8:])
    return q, k, v, replace(terms.with_tensors(*tensors[3:8]), scores=scores)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's kernel. On the CPU it takes values as wide as keys alone, and others without it."""
    if k.shape[-1] == v.shape[-1] or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, **options)
    features, scale = v.shape[-1], 1 / math.sqrt(q.shape[-1])
    q, k, v = _alike(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)[..., :features]


def cpu_kernel(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """torch's kernel on the CPU without autograd: output and lse."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    options.setdefault("scale", 1 / math.sqrt(q.shape[-1]))
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in _alike(q, k, v)]
    out, lse = attend(*inputs, attn_mask=added, **options)
    return out[..., : v.shape[-1]], lse


def _alike(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k and v of one width, because torch's kernel takes them alike."""
    width = max(k.shape[-1], v.shape[-1])
    return [_as_wide(x, width) for x in (q, k, v)]


def _as_wide(x: Tensor, width: int) -> Tensor:
    """x with zeros as further features, at least `width` together."""
    more = width - x.shape[-1]
    return F.pad(x, (0, more)) if more > 0 else x


def tiles(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, firsts: FirstKeys | None
) -> tuple[Tensor, Tensor | None]:
    """See megatron.attention.attention. Under autograd every block's scores are kept."""
    recorded = torch.is_grad_enabled()
    content, on_cpu = terms.content, q.device.type == "cpu"
    scope = Scope.of(q, k, terms)
    batch, heads = q.shape[:2]
    bias, weight = scope.reversed_tables(terms, k)
    wide = bias.dtype

    # Where content alone decides, keys before a block are under no mask, and its own under the
    # causal one: both go to torch's kernel as they are, a product u·w as one more feature. In half
    # precision it would be rounded, so there only numbers for each key are such a part.
    in_two = terms.is_causal_alone and on_cpu and not recorded
    if terms.scores is not None:
        in_two = in_two and (content is None or (content.u is None and content.rank == 1))
    else:
        in_two = in_two and (content is None or content.u is None or q.dtype == wide)
    rows = min(exact_rows(content, scope, LARGE_BLOCK if in_two else BLOCK), scope.queries)
    some_heads = on_cpu and terms.index_bias is None  # may be computed before others
    together = batch if some_heads else batch * heads
    differs_by_head = weight is not None or content is not None or terms.scores is not None
    is_masked = terms.segments is not None or terms.chunk is not None
    plain = not differs_by_head and not is_masked and terms.index_bias is None
    if not plain and not in_two:  # not a view of a table
        rows = min(rows, max(1, MOST_SCORES // (together * scope.keys)))
    if terms.scores is not None:
        rows = BLOCK
    features = v.shape[3]
    if in_two and content is not None and content.u is not None:
        # Room for w beside each key, once for all blocks; torch's kernel takes values as wide.
        k = F.pad(k, (0, content.features))
        v = _as_wide(v, k.shape[3])
    if scope.queries > rows:
        # Every block reads them: where they are views of a fused projection, a copy pays.
        k, v = (k if terms.scores is not None else k.contiguous()), v.contiguous()
    cached = CACHED_SCORES * torch.get_num_threads()
    differs_by_head = differs_by_head or (is_masked and terms.bias is not None)
    most = cached // batch if some_heads and differs_by_head and not in_two else None
    # Numbers to be overwritten by biases of content, which then have no gradient. Memory that the
    # system gives anew for each block takes nine times as long to fill.
    room = None
    if content is not None and not recorded and not in_two:
        room = bias.new_empty(max(cached, together * rows * scope.keys))

    dense = terms.needs_lse and (recorded or not on_cpu)  # the kernel keeps its lse to itself
    whole = None if recorded else q.new_empty(*q.shape[:3], features)
    outputs, lses = [], []
    for block in scope.blocks(rows):
        block_scores = None
        if terms.scores is not None:
            function, tensors = terms.scores
            block_scores = function(tensors, block.start, block.end)
        outputs_of_heads, lses_of_heads = [], []
        for group, part in groups_of_heads(block, heads, firsts, most):
            tile_q, tile_k = q[:, group, part.queries], k[:, group, part.keys]
            tile_v = v[:, group, part.keys]
            tile = None if block_scores is None else tuple(x[:, group] for x in block_scores)
            u = w = None
            if content is not None:
                u, w = content.part(part.queries, part.keys, group).relative(wide)
            if in_two:
                out, lse = _in_two(tile_q, tile_k, tile_v, u, w, tile)
            else:
                added = part.view(of_heads(bias, group))[None]  # [1, heads or 1, rows, columns]
                if terms.index_bias is not None:
                    added = added + terms.index_bias(*part.indices(q.device))
                if w is not None:
                    space = None
                    if room is not None:
                        shape = (*w.shape[:2], *added.shape[2:])
                        space = room[: math.prod(shape)].view(shape)
                    if u is not None and u.shape[-1] == 1:  # in one pass
                        added = torch.addcmul(added, u.flip(2), w.mT, out=space)
                    else:
                        content_bias = product(None if u is None else u.flip(2), w)
                        added = torch.add(added, content_bias, out=space)
                masked = _masked(part, terms, q.device)
                if masked is not None:
                    fill = added.masked_fill if room is None else added.masked_fill_
                    added = fill(masked, -math.inf)
                factor = None if weight is None else part.view(weight[group])
                if tile is not None or factor is not None or dense:
                    if tile is None:
                        products = tile_q.flip(2).to(wide) @ tile_k.to(wide).mT
                        scores = products / math.sqrt(q.shape[-1])
                    else:
                        scores = _given_scores(tile, part)
                    scores = scores + added if factor is None else scores * factor + added
                    out, lse = attended(scores, tile_v, terms.needs_lse)
                elif on_cpu and not recorded:
                    out, lse = cpu_kernel(tile_q.flip(2), tile_k, tile_v, added)
                else:
                    out, lse = _under_autograd(tile_q.flip(2), tile_k, tile_v, added), None
                out = out.flip(2)
                lse = None if lse is None else lse.flip(2)
            if terms.needs_lse:
                assert lse is not None
                if w is not None:  # what `relative` adds to all keys of a query
                    own_w = w[:, :, -part.rows :]
                    lse = lse - (own_w if u is None else u * own_w).sum(-1)
                lses_of_heads.append(lse)
            if whole is None:
                outputs_of_heads.append(out.to(q.dtype))
            else:
                whole[:, group, part.queries] = out[..., :features]
        outputs += [torch.cat(outputs_of_heads, dim=1)] if whole is None else []
        lses += [torch.cat(lses_of_heads, dim=1)] if lses_of_heads else []
    whole = torch.cat(outputs, dim=2) if whole is None else whole
    return whole, torch.cat(lses, dim=2) if lses else None


def exact_rows(content: Content | None, scope: Scope, most: int) -> int:
    """How many queries a block may have: at most `most`.

    In a block, float32 holds the differences of u·w from that of its last token. Where they are
    large, it loses digits, unless the block is small.
    """
    if content is None:
        return most
    rows = most
    while rows > LEAST_ROWS:
        # The largest product, at most, of the queries of a block and their own keys.
        spread = 0.0
        for block in Scope(scope.queries, scope.keys).blocks(rows):
            own_keys = slice(block.end_key - block.rows, block.end_key)
            u, w = content.part(block.queries, own_keys).relative(content.w.dtype)
            largest = w.abs().amax(2)
            if u is not None:
                largest = largest * u.abs().amax(2)
            spread = max(spread, float(largest.sum(-1).max()))
        if spread <= EXACT_SPREAD:
            break
        rows //= 2
    return rows


def _masked(part: QueryBlock, terms: Terms, device: torch.device) -> Tensor | None:
    """True for keys that tables do not hide, the last query first: as `mask` has it."""
    if terms.chunk is None and terms.segments is None:
        return None
    return mask(*part.indices(device), None, terms.chunk, terms.segments)


def _given_scores(block_scores: Scores, part: QueryBlock) -> Tensor:
    """Given scores of a block, the last query first: […, rows, columns]."""
    far_q, far_k, own_scores = block_scores
    far = far_q @ far_k[..., part.first_key :, :].mT
    return torch.cat([far, own_scores], dim=-1).flip(-2)


def _in_two(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, w: Tensor | None, block_scores: Scores | None
) -> tuple[Tensor, Tensor]:
    """Output and lse of a tile whose keys before the block and own keys are merged.

    With u, k ends with room for w.
    """
    rows, before = q.shape[2], k.shape[2] - q.shape[2]
    scale = 1 / math.sqrt(q.shape[3])
    masks: list[Tensor | None] = [None, None]  # of the keys before, and of the block's own
    if u is not None and w is not None:
        # The kernel divides all features by √head_dim.
        q = torch.cat([q, u / scale], dim=-1)
        k[..., -w.shape[3] :] = w
    elif w is not None:
        added = w.sum(-1)[:, :, None].expand(-1, -1, rows, -1)
        masks = [added[..., :before], added[..., before:]]
    far_q, far_k = q, k[:, :, :before]
    if block_scores is None:
        own_v = v[:, :, before:]
        out, lse = cpu_kernel(q, k[:, :, before:], own_v, masks[1], is_causal=True, scale=scale)
    else:
        far_q, far_k, own_scores = block_scores
        scale, v = 1.0, v.to(own_scores.dtype)
        later = torch.ones_like(own_scores[0, 0], dtype=torch.bool).triu(1)
        # In place: memory that the system gives anew takes longer to fill than to compute.
        p = own_scores.clone() if masks[1] is None else own_scores + masks[1]
        p.masked_fill_(later, -math.inf)
        largest = p.amax(dim=-1, keepdim=True)
        total = p.sub_(largest).exp_().sum(dim=-1, keepdim=True)
        out, lse = (p @ v[:, :, before:]).div_(total), (largest + total.log())[..., 0]
    if before == 0:
        return out, lse
    return merge(out, lse, *cpu_kernel(far_q, far_k, v[:, :, :before], masks[0], scale=scale))


def _under_autograd(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    """softmax(q·k/√head_dim + added) v by torch's kernel: [batch, heads, rows, features of v]."""
    if q.device.type == "cpu":
        return _fused(q, k, v, attn_mask=added)
    # CUDA's kernels need aligned rows in q's dtype. Copy first: then gradients add up in float32.
    with sdpa_kernel(KERNELS_WITH_MASK):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added.contiguous().to(q.dtype))


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    firsts: FirstKeys | None,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, weight, u, w and own_w, as these; None where there is none.

    out, dout: the output and its gradient, [batch, heads, queries, features]; dlse: of the lse;
    wants: of which tensors gradients are wanted. Tensors of given scores get theirs as `grad`.
    """
    # Everything is [heads, batch, length, features], the last query first; tables are reversed.
    scope, content, block_scores = Scope.of(q, k, terms), terms.content, None
    batch, heads, queries, head_dim = q.shape
    dtypes = q.dtype, k.dtype, v.dtype
    q, k, v = _heads_first(q.flip(2)), _heads_first(k), _heads_first(v)
    bias, weight = scope.reversed_tables(terms, k)
    wide = bias.dtype
    wide_q, wide_k, wide_v = q.to(wide) / math.sqrt(head_dim), k.to(wide), v.to(wide)
    mean = _heads_first((dout * out).sum(-1, keepdim=True).flip(2))
    lse_gradient = None if dlse is None else _heads_first(dlse[..., None].flip(2))
    dout = _heads_first(dout.flip(2))
    wide_dout = dout.to(wide)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    dbias = torch.zeros_like(bias) if wants[3] else None
    dweight = torch.zeros_like(weight) if weight is not None and wants[4] else None
    du = dw = grad_own_w = None
    as_features = content is not None and weight is None and terms.scores is None
    if content is not None:
        dw = torch.zeros_like(content.w)
        du = None if content.u is None else torch.zeros_like(content.u, dtype=torch.float32)
        if as_features:  # more features of q and k, with room for u and w
            room = (0, content.features)
            wide_q, wide_k = F.pad(wide_q, room, value=1.0), F.pad(wide_k, room)

    most = CACHED_SCORES // batch if q.device.type == "cpu" else None
    for block in scope.blocks(BACKWARD_BLOCK if terms.scores is None else BLOCK):
        rows = slice(queries - block.end, queries - block.start)
        if terms.scores is not None:
            function, tensors = terms.scores
            with torch.enable_grad():
                leaves = function(tensors, block.start, block.end)
            block_scores = [x.detach().transpose(0, 1) for x in leaves]
            dgiven = [torch.zeros_like(x) for x in block_scores]
        for group, part in groups_of_heads(block, heads, firsts, most):
            row_index, column_index = (group, slice(None), rows), (group, slice(None), part.keys)
            u = w = None
            if content is not None:
                u, w = content.part(part.queries, part.keys, group).relative(wide)
                u, w = None if u is None else u.flip(2).transpose(0, 1), w.transpose(0, 1)

            # q·k / √head_dim, with a bias by content unless that would be multiplied by a weight.
            if block_scores is None:
                tile_q, tile_k = wide_q[row_index], wide_k[column_index]
                if w is not None and as_features:
                    tile_k[..., -w.shape[-1] :] = w
                    if u is not None:
                        tile_q[..., -u.shape[-1] :] = u
                products = tile_q @ tile_k.mT  # [heads, batch, rows, columns]
            else:
                products = _given_scores(tuple(x[group] for x in block_scores), part)
            scores = products
            if weight is not None:
                scores = products * part.view(weight[group])[:, None]
            if w is not None and not as_features:
                scores = scores.add_(product(u, w))
            scores.add_(part.view(of_heads(bias, group))[:, None])
            masked = _masked(part, terms, q.device)
            if masked is not None:
                masked = masked.transpose(0, 1) if terms.segments is not None else masked
                scores.masked_fill_(masked, -math.inf)
            probabilities = scores.softmax(dim=-1)

            dprobabilities = wide_dout[row_index] @ wide_v[column_index].mT
            padded = probabilities.new_empty(*probabilities.shape[:-1], part.columns + part.rows)
            dscores = padded[..., : part.columns]
            if q.dtype == wide:
                torch.mul(probabilities, dprobabilities.sub_(mean[row_index]), out=dscores)
            else:
                # Not by a rounded output: gradients of tables are sums of small differences.
                dscores.copy_(
                    torch.ops.aten._softmax_backward_data(dprobabilities, probabilities, -1, wide)
                )
            if lse_gradient is not None:
                dscores.addcmul_(probabilities, lse_gradient[row_index])
            if dbias is not None:
                part.add_diagonals(dbias[group], padded)
            if content is not None and w is not None and dw is not None:
                # For ones too as a product: the sum is faster.
                left = dscores.new_ones(1, part.rows) if u is None else u.mT
                key_sums = (left @ dscores).mT.to(dw.dtype).transpose(0, 1)
                if content.u is not None and content.features > content.rank:
                    last_u = content.u[:, group, part.end - 1, None]  # products of the last query
                    key_sums = key_sums[..., :-1] + key_sums[..., -1:] * last_u
                dw[:, group, part.keys] += key_sums
            if u is not None and w is not None and du is not None:
                # Only differences from a query's own key count, whose rounding a large w would
                # multiply.
                own_w = w[:, :, -part.rows :].flip(2)
                rounding = dscores @ torch.ones_like(w[..., :1])
                query_sums = (dscores @ w - rounding * own_w).transpose(0, 1)
                du[:, group, part.queries] = query_sums[..., : du.shape[-1]].flip(2)
            if dweight is not None:
                weighted = torch.empty_like(padded)
                torch.mul(dscores, products, out=weighted[..., : part.columns])
                part.add_diagonals(dweight[group], weighted)

            # Tables need dscores in float32. What is rounded to q's dtype in the end does not.
            if weight is not None:
                dscores.mul_(part.view(weight[group])[:, None])
            if block_scores is None:
                dproducts = dscores.to(q.dtype)
                dq[row_index] = dproducts @ k[column_index]
                _add_product(dk[column_index], dproducts.mT, q[row_index])
            else:
                far_q, far_k, _ = (x[group] for x in block_scores)
                near = part.columns - part.rows
                upright = dscores.flip(2)
                far_keys = slice(part.first_key, None)
                dgiven[0][group] = upright[..., :near] @ far_k[:, :, far_keys]
                dgiven[1][group, :, far_keys] = upright[..., :near].mT @ far_q
                dgiven[2][group] = upright[..., near:]
            _add_product(dv[column_index], probabilities.to(q.dtype).mT, dout[row_index])
        if block_scores is not None:
            learning = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]
            leaf_gradients = [dgiven[number].transpose(0, 1) for number in learning]
            torch.autograd.backward([leaves[number] for number in learning], leaf_gradients)

    scale = 1 / math.sqrt(head_dim)
    dq = dq.mul_(scale).transpose(0, 1).flip(2).to(dtypes[0])
    dk = dk.mul_(scale).transpose(0, 1).to(dtypes[1])
    dv = dv.transpose(0, 1).to(dtypes[2])
    if du is not None and content is not None and content.u is not None:
        du = du.to(content.u.dtype)
    if dlse is not None and content is not None:  # of what is subtracted: w of the own key
        grad_own_w = -dlse[..., None].to(content.w.dtype)
        grad_own_w = (
            grad_own_w.expand_as(content.own_w) if content.u is None else grad_own_w * content.u
        )
    table_gradients = scope.restored(dbias, terms.bias), scope.restored(dweight, terms.weight)
    return dq, dk, dv, *table_gradients, du, dw, grad_own_w


def _heads_first(x: Tensor) -> Tensor:
    """[batch, heads, length, features] -> [heads, batch, length, features], contiguous."""
    return x.transpose(0, 1).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass where all have one dtype."""
    if total.dtype == left.dtype:
        total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    else:
        total += left @ right
