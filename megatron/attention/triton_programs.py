"""Causal attention with distance tables as Triton programs: forward, and backward without atomics.

The tables contain the mask. They come padded by PAD on both sides, the bias with -inf where the key
is later than the query or outside the window. So a tile needs no mask for causality, windows or
ragged ends, and no read is out of bounds. Scores are in base 2 (bias and `scale` include log2 e).

Shapes and names are those of megatron.attention. Tiles are [BLOCK_Q, BLOCK_K]; COLUMNS is head_dim
rounded up to a power of two. `position` is a query's index among the keys, `row` its index among
the queries. `begins` and `ends` [batch, keys] say where the document of each token begins and
ends: tokens of one document have one beginning. A prefix d means the gradient of the loss: dout,
dq, dscores.

Outputs are laid out as [batch, length, heads, head_dim], statistics of rows (lse, delta) as
[batch, heads, queries]. The flags WEIGHT and SEGMENTS say which pointers are read,
DIRECT how tables are (see `_read`), TABLES whether gradients of tables are wanted.

A bias by content (CONTENT) is u [batch, heads, queries] times w [batch, heads, 2, keys], where two
float32 numbers hold a float64: it and the rest. ONES: no u is read.
"""

# The language of the programs only looks like Python.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false

import triton
import triton.language as tl

PAD = 512  # twice the sum of both tile sizes: a load one tile ahead is in bounds too
NO_TOKEN = tl.constexpr(2**31 - 1)
LOG_2 = tl.constexpr(0.6931471805599453)  # scores without the log2 e that `scale` includes
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(start, stride, row, valid, column, HEAD_DIM: tl.constexpr):
    """Rows of a matrix, zero where they are not valid and beyond head_dim: [rows, COLUMNS]."""
    mask = valid[:, None] & (column < HEAD_DIM)[None, :]
    address = start + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def _store(start, stride, row, valid, column, value, HEAD_DIM: tl.constexpr):
    """Write the valid rows of a tile [rows, COLUMNS] up to head_dim."""
    mask = valid[:, None] & (column < HEAD_DIM)[None, :]
    address = start + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(address, value.to(start.dtype.element_ty), mask=mask)


@triton.jit
def _read(address, DIRECT: tl.constexpr):
    """Numbers of a table, float32 in the shape of the addresses.

    tl.load goes through shared memory: it is pipelined in copies of 4 bytes, and its layout is not
    that of the products. DIRECT reads each number into the register where the products want it.

    is_pure lets the compiler move such a read past any write, skip it, or do it too early. All
    three are right: no program writes a table, the kernels that did ended before this one began
    (hence .nc, the cache for read-only data), and the padding makes early addresses valid.
    """
    if DIRECT:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - only so does Triton leave the other branch out
        return tl.load(address)


@triton.jit
def _tokens(begins, w, keys, index, valid, SEGMENTS: tl.constexpr, CONTENT: tl.constexpr):
    """Of tokens by their index among the keys: the document, and w as two float32 numbers.

    A number that is not stored is 0, and what no program uses may be anything.
    """
    document = index
    high = tl.zeros(index.shape, tl.float32)
    low = tl.zeros(index.shape, tl.float32)
    if SEGMENTS:
        document = tl.load(begins + index, mask=valid, other=NO_TOKEN)
    if CONTENT:
        high = tl.load(w + index, mask=valid, other=0.0)
        low = tl.load(w + keys + index, mask=valid, other=0.0)
    return document, high, low


@triton.jit
def _read_u(u, row, valid, CONTENT: tl.constexpr, ONES: tl.constexpr):
    """u of some queries, or ones; what no program uses where there is no bias by content."""
    numbers = tl.full(row.shape, 1.0, tl.float32)
    if CONTENT and not ONES:
        numbers = tl.load(u + row, mask=valid, other=0.0)
    return numbers


@triton.jit
def _scores(
    product, query, row_u, key, distance, bias, weight, AXIS: tl.constexpr,
    WEIGHT: tl.constexpr, SEGMENTS: tl.constexpr, DIRECT: tl.constexpr, CONTENT: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 with -inf where masked, the factor of the products, and what u multiplied.

    query, key: from `_tokens`; AXIS: 1 if queries are rows of the tile, 0 if they are columns.
    The softmax ignores what is the same for all keys of a query. So w of its own key is subtracted,
    with the digits that both have: every program subtracts the same number whatever its tiles, and
    lse means the same in all.
    """
    query_document, own_high, own_low = query
    document, high, low = key
    factor = product
    if WEIGHT:
        factor = _read(weight + distance, DIRECT)
        product = product * factor
    scores = product + _read(bias + distance, DIRECT)
    if SEGMENTS:
        query_side = tl.expand_dims(query_document, AXIS)
        is_other = query_side != tl.expand_dims(document, 1 - AXIS)
        scores = tl.where(is_other, float("-inf"), scores)
    near = scores
    if CONTENT:
        near = tl.expand_dims(high, 1 - AXIS) - tl.expand_dims(own_high, AXIS)
        near += tl.expand_dims(low, 1 - AXIS) - tl.expand_dims(own_low, AXIS)
        scores += tl.expand_dims(row_u * LOG2_E, AXIS) * near
    return scores, factor, near


@triton.jit
def _of_pair(pair, heads, queries, keys, bias, weight, table_row, begins, u, w):
    """batch, head and pair of both, and where the numbers of one pair begin."""
    pair = pair.to(tl.int64)
    batch = pair // heads
    head = pair % heads
    bias += head * table_row
    weight += head * table_row
    begins += batch * keys
    u += pair * queries
    w += pair * 2 * keys
    return batch, head, pair, bias, weight, begins, u, w


@triton.jit
def _visible_keys(
    block, document, before, keys, window, BLOCK_Q: tl.constexpr, SEGMENTS: tl.constexpr
):
    """The keys that some query of a block may attend to: first, end."""
    start = before + block * BLOCK_Q
    first = tl.maximum(start - window + 1, 0)
    if SEGMENTS:
        first = tl.maximum(first, tl.min(document, 0))
    end = tl.minimum(start + BLOCK_Q, keys)
    return first, end


@triton.jit
def forward(
    q, k, v, bias, weight, begins, u, w, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    table_row, heads, queries, keys, window, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT: tl.constexpr, SEGMENTS: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, CONTENT: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """One block of queries: out, and lse, the log2 of each row's sum of exponentials in base 2."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    # Triton 3.7 types the call of a program as one that never returns.
    batch, head, pair, bias, weight, begins, u, w = _of_pair(  # pyright: ignore
        tl.program_id(1), heads, queries, keys, bias, weight, table_row, begins, u, w
    )
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = row < queries
    position = keys - queries + row
    column = tl.arange(0, COLUMNS)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    q_tile = _load(q, q_row, row, valid, column, HEAD_DIM)
    # Finite, so that a row whose tile is all masked gives no -inf - -inf.
    highest = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    result = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    row_u = _read_u(u, row, valid, CONTENT, ONES)
    query = _tokens(begins, w, keys, position, valid, SEGMENTS, CONTENT)
    first, end = _visible_keys(block, query[0], keys - queries, keys, window, BLOCK_Q, SEGMENTS)
    distance = tl.arange(0, BLOCK_Q)[:, None] - tl.arange(0, BLOCK_K)[None, :]
    for start in range(first, end, BLOCK_K):
        tile_distance = keys - queries + block * BLOCK_Q - start
        index = start + tl.arange(0, BLOCK_K)
        inside = index < keys
        k_tile = _load(k, k_row, index, inside, column, HEAD_DIM)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        key = _tokens(begins, w, keys, index, inside, SEGMENTS, CONTENT)
        scores, _, _ = _scores(
            product, query, row_u, key, distance, bias + tile_distance, weight + tile_distance,
            1, WEIGHT, SEGMENTS, DIRECT, CONTENT,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, 1))
        probabilities = tl.exp2(scores - higher[:, None])  # not yet divided by their sum
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(probabilities, 1)
        v_tile = _load(v, v_row, index, inside, column, HEAD_DIM)
        probabilities = probabilities.to(v_tile.dtype)
        decayed = result * decay[:, None]
        result = tl.dot(probabilities, v_tile, decayed, input_precision=PRECISION)
        highest = higher
    out += (batch * queries * heads + head) * HEAD_DIM
    _store(out, heads * HEAD_DIM, row, valid, column, result / total[:, None], HEAD_DIM)
    tl.store(lse + pair * queries + row, highest + tl.log2(total), mask=valid)


@triton.jit
def _add_diagonals(sums, tile_distance, tile, far_before):
    """Write the sums of the distances tile_distance + [0, size); return those of the size before.

    A square tile holds distances from tile_distance - size + 1 to tile_distance + size - 1. Each
    row rotates until equal distances, or those that differ by size, share a column. far_before:
    what the tile before, one tile further back, adds to the distances that are written.
    """
    size: tl.constexpr = tile.shape[0]
    row = tl.arange(0, size)[:, None]
    distance = tl.arange(0, size)[None, :]
    column = row - distance
    rotated = tl.gather(tile, column & (size - 1), 1)
    near = tl.sum(tl.where(column >= 0, rotated, 0.0), 0)
    far = tl.sum(tl.where(column < 0, rotated, 0.0), 0)
    _store_distances(sums, tile_distance, near + far_before)
    return far


@triton.jit
def _store_distances(sums, first, values):
    """Write the sums of the distances from `first` on, where there are such distances."""
    index = tl.arange(0, values.shape[0])
    tl.store(sums + index, values, mask=first + index >= 0)


@triton.jit(do_not_specialize=["first_pair"])
def query_gradient(
    q, k, v, bias, weight, begins, u, w, out, lse, dout, dlse, delta, dq, du,
    dbias, dweight,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row,
    table_row, heads, queries, keys, window, scale, first_pair, distances,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT: tl.constexpr, SEGMENTS: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, TABLES: tl.constexpr, CONTENT: tl.constexpr,
    ONES: tl.constexpr,
):  # fmt: skip
    """One block of queries: dq, du, and delta, which other programs need: out · dout - dlse.

    The launch's first pair of batch and head is `first_pair`. With TABLES, the block's own sums for
    the tables go to dbias and dweight [pairs of the launch, blocks, distances], zero before. Each
    distance is written once. Tiles are square then.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    batch, head, pair, bias, weight, begins, u, w = _of_pair(  # pyright: ignore
        first_pair + tl.program_id(1),
        heads,
        queries,
        keys,
        bias,
        weight,
        table_row,
        begins,
        u,
        w,
    )
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = row < queries
    position = keys - queries + row
    column = tl.arange(0, COLUMNS)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    q_tile = _load(q + batch * q_batch + head * q_head, q_row, row, valid, column, HEAD_DIM)
    dout += batch * dout_batch + head * dout_head
    dout_tile = _load(dout, dout_row, row, valid, column, HEAD_DIM)
    written = (batch * queries * heads + head) * HEAD_DIM
    out_tile = _load(out + written, heads * HEAD_DIM, row, valid, column, HEAD_DIM)
    statistics = pair * queries + row
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row_delta -= tl.load(dlse + statistics, mask=valid, other=0.0)
    tl.store(delta + statistics, row_delta, mask=valid)
    # inf beyond the last query: its probabilities are 0.
    row_lse = tl.load(lse + statistics, mask=valid, other=float("inf"))
    dq_tile = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    row_du = tl.zeros([BLOCK_Q], tl.float32)
    sums = (tl.program_id(1) * tl.num_programs(0) + block).to(tl.int64) * distances
    dbias += sums
    dweight += sums
    dbias_far = tl.zeros([BLOCK_K], tl.float32)
    dweight_far = tl.zeros([BLOCK_K], tl.float32)
    tile_distance = 0
    row_u = _read_u(u, row, valid, CONTENT, ONES)
    query = _tokens(begins, w, keys, position, valid, SEGMENTS, CONTENT)
    first, end = _visible_keys(block, query[0], keys - queries, keys, window, BLOCK_Q, SEGMENTS)
    distance = tl.arange(0, BLOCK_Q)[:, None] - tl.arange(0, BLOCK_K)[None, :]
    for start in range(first, end, BLOCK_K):
        tile_distance = keys - queries + block * BLOCK_Q - start
        index = start + tl.arange(0, BLOCK_K)
        inside = index < keys
        k_tile = _load(k, k_row, index, inside, column, HEAD_DIM)
        v_tile = _load(v, v_row, index, inside, column, HEAD_DIM)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        key = _tokens(begins, w, keys, index, inside, SEGMENTS, CONTENT)
        scores, factor, near = _scores(
            product, query, row_u, key, distance, bias + tile_distance, weight + tile_distance,
            1, WEIGHT, SEGMENTS, DIRECT, CONTENT,
        )  # fmt: skip
        probabilities = tl.exp2(scores - row_lse[:, None])
        dprobabilities = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
        dscores = probabilities * (dprobabilities - row_delta[:, None])
        if CONTENT and not ONES:
            row_du += tl.sum(dscores * near, 1)
        if TABLES:
            dbias_far = _add_diagonals(dbias + tile_distance, tile_distance, dscores, dbias_far)
            if WEIGHT:
                dfactor = dscores * product * LOG_2
                dweight_far = _add_diagonals(
                    dweight + tile_distance, tile_distance, dfactor, dweight_far
                )
        if WEIGHT:
            dscores = dscores * factor
        dq_tile = tl.dot(dscores.to(k_tile.dtype), k_tile, dq_tile, input_precision=PRECISION)
    if TABLES:
        _store_distances(dbias + tile_distance - BLOCK_K, tile_distance - BLOCK_K, dbias_far)
        if WEIGHT:
            _store_distances(
                dweight + tile_distance - BLOCK_K, tile_distance - BLOCK_K, dweight_far
            )
    if CONTENT and not ONES:
        tl.store(du + statistics, row_du, mask=valid)
    dq_tile = dq_tile * (scale * LOG_2)
    _store(dq + written, heads * HEAD_DIM, row, valid, column, dq_tile, HEAD_DIM)


@triton.jit
def key_gradients(
    q, k, v, bias, weight, begins, u, w, ends, lse, dout, delta, dk, dv, dw,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row,
    table_row, heads, queries, keys, window, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT: tl.constexpr, SEGMENTS: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, CONTENT: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """One block of keys: dk, dv and dw; tiles are [BLOCK_K, BLOCK_Q], the left side of tl.dot."""
    block = tl.program_id(0)  # the longest first
    batch, head, pair, bias, weight, begins, u, w = _of_pair(  # pyright: ignore
        tl.program_id(1), heads, queries, keys, bias, weight, table_row, begins, u, w
    )
    before = keys - queries
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    valid = key < keys
    column = tl.arange(0, COLUMNS)
    q += batch * q_batch + head * q_head
    dout += batch * dout_batch + head * dout_head
    lse += pair * queries
    delta += pair * queries
    key_tokens = _tokens(begins, w, keys, key, valid, SEGMENTS, CONTENT)
    k_tile = _load(k + batch * k_batch + head * k_head, k_row, key, valid, column, HEAD_DIM)
    v_tile = _load(v + batch * v_batch + head * v_head, v_row, key, valid, column, HEAD_DIM)
    dk_tile = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    key_dw = tl.zeros([BLOCK_K], tl.float32)
    last = block * BLOCK_K + BLOCK_K - 1
    end = tl.minimum(last + window - before, queries)
    if SEGMENTS:
        last_end = tl.max(tl.load(ends + batch * keys + key, mask=valid, other=0), 0)
        end = tl.minimum(end, last_end - before)
    distance = tl.arange(0, BLOCK_Q)[None, :] - tl.arange(0, BLOCK_K)[:, None]
    for start in range(tl.maximum(block * BLOCK_K - before, 0), end, BLOCK_Q):
        tile_distance = before + start - block * BLOCK_K
        row = start + tl.arange(0, BLOCK_Q)
        inside = row < queries
        position = before + row
        q_tile = _load(q, q_row, row, inside, column, HEAD_DIM)
        dout_tile = _load(dout, dout_row, row, inside, column, HEAD_DIM)
        row_lse = tl.load(lse + row, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
        query = _tokens(begins, w, keys, position, inside, SEGMENTS, CONTENT)
        row_u = _read_u(u, row, inside, CONTENT, ONES)
        scores, factor, _ = _scores(
            product, query, row_u, key_tokens, distance, bias + tile_distance,
            weight + tile_distance, 0, WEIGHT, SEGMENTS, DIRECT, CONTENT,
        )  # fmt: skip
        probabilities = tl.exp2(scores - row_lse[None, :])
        rounded = probabilities.to(dout_tile.dtype)
        dv_tile = tl.dot(rounded, dout_tile, dv_tile, input_precision=PRECISION)
        dprobabilities = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
        dscores = probabilities * (dprobabilities - row_delta[None, :])
        if CONTENT:
            key_dw += tl.sum(dscores * row_u[None, :], 1)
        if WEIGHT:
            dscores = dscores * factor
        dk_tile = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)
    written = (batch * keys * heads + head) * HEAD_DIM
    if CONTENT:
        tl.store(dw + pair * keys + key, key_dw, mask=valid)
    dk_tile = dk_tile * (scale * LOG_2)
    _store(dk + written, heads * HEAD_DIM, key, valid, column, dk_tile, HEAD_DIM)
    _store(dv + written, heads * HEAD_DIM, key, valid, column, dv_tile, HEAD_DIM)
