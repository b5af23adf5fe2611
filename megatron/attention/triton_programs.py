"""Causal attention with distance tables as Triton programs: forward, and backward without atomics.

What no query sees stands in the tables: they come padded by PAD on both sides, the bias with -inf where the key is
later than the query or out of the window, so that a tile needs no mask for causality, windows or ragged ends, and no
read is out of bounds. Scores are in base 2 (the bias and `scale` hold log2 e).

Shapes and names are those of megatron.attention; tiles are [BLOCK_Q, BLOCK_K], COLUMNS is head_dim rounded up to a
power of two; `position` is a query's index among the keys, `row` its index among the queries. `reach` tells for every
block how far its segments go (see triton_kernel.py). What the programs write is laid out as [batch, length, heads,
head_dim]; row statistics as [batch, heads, queries]. The flags WEIGHT, CHUNK and SEGMENTS say which pointers count.
"""

# The language of the programs only looks like Python.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false

import triton
import triton.language as tl

PAD = 256  # at least the sum of both tile sizes


@triton.jit
def _load(start, stride, row, valid, column, HEAD_DIM: tl.constexpr):
    """Rows of a matrix, zero where they are not valid and beyond head_dim: [rows, COLUMNS]."""
    mask = valid[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(
        start + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0
    )


@triton.jit
def _store(start, stride, row, valid, column, value, HEAD_DIM: tl.constexpr):
    mask = valid[:, None] & (column < HEAD_DIM)[None, :]
    value = value.to(start.dtype.element_ty)
    tl.store(start + row.to(tl.int64)[:, None] * stride + column[None, :], value, mask=mask)


@triton.jit
def _logits(
    product, position, key, distance, query_segment, key_segment, bias, weight, chunk,
    WEIGHT: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 with everything out of sight at -inf, and what the products were multiplied by.

    position, key and the segments may stand as [rows, 1] and [1, columns] or the other way round.
    """
    factor = product
    if WEIGHT:
        factor = tl.load(weight + distance)
        product = product * factor
    logits = product + tl.load(bias + distance)
    if CHUNK:
        logits = tl.where(position // chunk - key // chunk > 1, float("-inf"), logits)
    if SEGMENTS:
        logits = tl.where(query_segment != key_segment, float("-inf"), logits)
    return logits, factor


@triton.jit
def _seen_keys(
    block, batch, reach, before, keys, window, chunk, BLOCK_Q: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """The keys that some query of a block may see: first, end."""
    start = before + block * BLOCK_Q
    first = tl.maximum(tl.maximum(start - window + 1, (start // chunk - 1) * chunk), 0)
    if SEGMENTS:
        first = tl.maximum(first, tl.load(reach + batch * tl.num_programs(0) + block))
    return first, tl.minimum(start + BLOCK_Q, keys)


@triton.jit
def forward(
    q, k, v, bias, weight, segments, reach, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    table_row, heads, queries, keys, window, chunk, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries: out, and lse, the logarithm of the sum of exponentials, both in base 2."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = row < queries
    position = keys - queries + row
    column = tl.arange(0, COLUMNS)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    bias += head * table_row
    weight += head * table_row
    segments += batch * keys
    query_segment = position
    if SEGMENTS:
        query_segment = tl.load(segments + position, mask=valid, other=0)
    q_tile = _load(q, q_row, row, valid, column, HEAD_DIM)
    # Finite, so that a row that sees nothing of a tile gives no -inf - -inf.
    highest = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    result = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    first, end = _seen_keys(
        block, batch, reach, keys - queries, keys, window, chunk, BLOCK_Q, SEGMENTS
    )
    distance = tl.arange(0, BLOCK_Q)[:, None] - tl.arange(0, BLOCK_K)[None, :]
    for start in range(first, end, BLOCK_K):
        away = keys - queries + block * BLOCK_Q - start
        key = start + tl.arange(0, BLOCK_K)
        key_segment = key
        if SEGMENTS:
            key_segment = tl.load(segments + key, mask=key < keys, other=0)
        k_tile = _load(k, k_row, key, key < keys, column, HEAD_DIM)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        logits, _ = _logits(
            product, position[:, None], key[None, :], distance, query_segment[:, None], key_segment[None, :],
            bias + away, weight + away, chunk, WEIGHT, CHUNK, SEGMENTS,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(logits, 1))
        share = tl.exp2(logits - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(share, 1)
        v_tile = _load(v, v_row, key, key < keys, column, HEAD_DIM)
        result = tl.dot(
            share.to(v_tile.dtype), v_tile, result * decay[:, None], input_precision=PRECISION
        )
        highest = higher
    out += (batch * queries * heads + head) * HEAD_DIM
    _store(out, heads * HEAD_DIM, row, valid, column, result / total[:, None], HEAD_DIM)
    tl.store(lse + (batch * heads + head) * queries + row, highest + tl.log2(total), mask=valid)


@triton.jit
def query_gradient(
    q, k, v, bias, weight, segments, reach, out, lse, out_gradient, delta, gradient,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_gradient_batch, out_gradient_head, out_gradient_row,
    table_row, heads, queries, keys, window, chunk, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries: the gradient of q, and delta, the row sums of out · its gradient that the rest needs."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = row < queries
    position = keys - queries + row
    column = tl.arange(0, COLUMNS)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    bias += head * table_row
    weight += head * table_row
    segments += batch * keys
    query_segment = position
    if SEGMENTS:
        query_segment = tl.load(segments + position, mask=valid, other=0)
    q_tile = _load(q + batch * q_batch + head * q_head, q_row, row, valid, column, HEAD_DIM)
    out_gradient += batch * out_gradient_batch + head * out_gradient_head
    do_tile = _load(out_gradient, out_gradient_row, row, valid, column, HEAD_DIM)
    written = (batch * queries * heads + head) * HEAD_DIM
    out_tile = _load(out + written, heads * HEAD_DIM, row, valid, column, HEAD_DIM)
    row_delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    statistics = (batch * heads + head) * queries + row
    tl.store(delta + statistics, row_delta, mask=valid)
    row_lse = tl.load(
        lse + statistics, mask=valid, other=float("inf")
    )  # no share where there is no query
    result = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    first, end = _seen_keys(
        block, batch, reach, keys - queries, keys, window, chunk, BLOCK_Q, SEGMENTS
    )
    distance = tl.arange(0, BLOCK_Q)[:, None] - tl.arange(0, BLOCK_K)[None, :]
    for start in range(first, end, BLOCK_K):
        away = keys - queries + block * BLOCK_Q - start
        key = start + tl.arange(0, BLOCK_K)
        key_segment = key
        if SEGMENTS:
            key_segment = tl.load(segments + key, mask=key < keys, other=0)
        k_tile = _load(k, k_row, key, key < keys, column, HEAD_DIM)
        v_tile = _load(v, v_row, key, key < keys, column, HEAD_DIM)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        logits, factor = _logits(
            product, position[:, None], key[None, :], distance, query_segment[:, None], key_segment[None, :],
            bias + away, weight + away, chunk, WEIGHT, CHUNK, SEGMENTS,
        )  # fmt: skip
        slope = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        slope = tl.exp2(logits - row_lse[:, None]) * (slope - row_delta[:, None])
        if WEIGHT:
            slope = slope * factor
        result = tl.dot(slope.to(k_tile.dtype), k_tile, result, input_precision=PRECISION)
    # scale holds log2 e, which belongs to the scores alone.
    _store(
        gradient + written,
        heads * HEAD_DIM,
        row,
        valid,
        column,
        result * (scale * 0.6931471805599453),
        HEAD_DIM,
    )


@triton.jit
def key_gradients(
    q, k, v, bias, weight, segments, reach, lse, out_gradient, delta, k_gradient, v_gradient,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_gradient_batch, out_gradient_head, out_gradient_row,
    table_row, heads, queries, keys, window, chunk, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: the gradients of k and v; tiles are [BLOCK_K, BLOCK_Q], so that they are dot's left side."""
    block = tl.program_id(0)  # the longest first
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    before = keys - queries
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    valid = key < keys
    column = tl.arange(0, COLUMNS)
    q += batch * q_batch + head * q_head
    out_gradient += batch * out_gradient_batch + head * out_gradient_head
    bias += head * table_row
    weight += head * table_row
    segments += batch * keys
    lse += (batch * heads + head) * queries
    delta += (batch * heads + head) * queries
    key_segment = key
    if SEGMENTS:
        key_segment = tl.load(segments + key, mask=valid, other=0)
    k_tile = _load(k + batch * k_batch + head * k_head, k_row, key, valid, column, HEAD_DIM)
    v_tile = _load(v + batch * v_batch + head * v_head, v_row, key, valid, column, HEAD_DIM)
    k_result = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    v_result = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    last = block * BLOCK_K + BLOCK_K - 1
    end = tl.minimum(tl.minimum(last + window, (last // chunk + 2) * chunk) - before, queries)
    if SEGMENTS:
        end = tl.minimum(end, tl.load(reach + batch * tl.num_programs(0) + block))
    distance = tl.arange(0, BLOCK_Q)[None, :] - tl.arange(0, BLOCK_K)[:, None]
    for start in range(tl.maximum(block * BLOCK_K - before, 0), end, BLOCK_Q):
        away = before + start - block * BLOCK_K
        row = start + tl.arange(0, BLOCK_Q)
        inside = row < queries
        position = before + row
        query_segment = position
        if SEGMENTS:
            query_segment = tl.load(segments + position, mask=inside, other=0)
        q_tile = _load(q, q_row, row, inside, column, HEAD_DIM)
        do_tile = _load(out_gradient, out_gradient_row, row, inside, column, HEAD_DIM)
        row_lse = tl.load(
            lse + row, mask=inside, other=float("inf")
        )  # no share where there is no query
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
        logits, factor = _logits(
            product, position[None, :], key[:, None], distance, query_segment[None, :], key_segment[:, None],
            bias + away, weight + away, chunk, WEIGHT, CHUNK, SEGMENTS,
        )  # fmt: skip
        share = tl.exp2(logits - row_lse[None, :])
        v_result = tl.dot(share.to(do_tile.dtype), do_tile, v_result, input_precision=PRECISION)
        slope = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
        slope = share * (slope - row_delta[None, :])
        if WEIGHT:
            slope = slope * factor
        k_result = tl.dot(slope.to(q_tile.dtype), q_tile, k_result, input_precision=PRECISION)
    written = (batch * keys * heads + head) * HEAD_DIM
    k_result = k_result * (scale * 0.6931471805599453)  # without the scores' log2 e
    _store(k_gradient + written, heads * HEAD_DIM, key, valid, column, k_result, HEAD_DIM)
    _store(v_gradient + written, heads * HEAD_DIM, key, valid, column, v_result, HEAD_DIM)


@triton.jit
def table_gradients(
    q, k, v, bias, weight, segments, meet, lse, out_gradient, delta, bias_sums, weight_sums,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_gradient_batch, out_gradient_head, out_gradient_row,
    table_row, batches, heads, queries, keys, chunk, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One offset between query block and key block: all its tiles hold the same distances, so they add up in place.

    Program (offset, head, split) takes every split-th of the tiles over batch and query blocks, counted by position,
    and writes sums [splits, heads, offsets, 2, BLOCK]: first of distances offset · BLOCK + 0 …, then of those - BLOCK.
    """
    offset = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    before = keys - queries
    column = tl.arange(0, COLUMNS)
    q += head * q_head
    k += head * k_head
    v += head * v_head
    out_gradient += head * out_gradient_head
    bias += head * table_row
    weight += head * table_row
    blocks = tl.cdiv(keys, BLOCK)
    first = tl.maximum(offset, before // BLOCK)
    count = blocks - first
    slopes = tl.zeros([BLOCK, BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK, BLOCK], tl.float32)
    distance = tl.arange(0, BLOCK)[:, None] - tl.arange(0, BLOCK)[None, :]
    away = offset * BLOCK
    for item in range(tl.program_id(2), batches * count, tl.num_programs(2)):
        block = first + item % count
        batch = (item // count).to(tl.int64)
        position = block * BLOCK + tl.arange(0, BLOCK)
        key = (block - offset) * BLOCK + tl.arange(0, BLOCK)
        row = position - before
        inside = (row >= 0) & (row < queries)
        query_segment = position
        key_segment = key
        if SEGMENTS:
            query_segment = tl.load(segments + batch * keys + position, mask=inside, other=0)
            key_segment = tl.load(segments + batch * keys + key, mask=key < keys, other=0)
        q_tile = _load(q + batch * q_batch, q_row, row, inside, column, HEAD_DIM)
        k_tile = _load(k + batch * k_batch, k_row, key, key < keys, column, HEAD_DIM)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        logits, _ = _logits(
            product, position[:, None], key[None, :], distance, query_segment[:, None], key_segment[None, :],
            bias + away, weight + away, chunk, WEIGHT, CHUNK, SEGMENTS,
        )  # fmt: skip
        do_tile = _load(
            out_gradient + batch * out_gradient_batch,
            out_gradient_row,
            row,
            inside,
            column,
            HEAD_DIM,
        )
        v_tile = _load(v + batch * v_batch, v_row, key, key < keys, column, HEAD_DIM)
        statistics = (batch * heads + head) * queries + row
        row_lse = tl.load(
            lse + statistics, mask=inside, other=float("inf")
        )  # no share where there is no query
        row_delta = tl.load(delta + statistics, mask=inside, other=0.0)
        slope = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        slope = tl.exp2(logits - row_lse[:, None]) * (slope - row_delta[:, None])
        slopes += slope
        if WEIGHT:
            weighted += slope * product
    written = (tl.program_id(2) * heads + head) * tl.num_programs(0) + offset
    _write_sums(bias_sums + written * 2 * BLOCK, slopes, BLOCK)
    if WEIGHT:
        _write_sums(
            weight_sums + written * 2 * BLOCK, weighted * 0.6931471805599453, BLOCK
        )  # products without log2 e


@triton.jit
def _write_sums(sums, tile, BLOCK: tl.constexpr):
    """Sums along the diagonals of a tile: rows are turned until equal distances stand in one column."""
    row = tl.arange(0, BLOCK)[:, None]
    distance = tl.arange(0, BLOCK)[None, :]
    turned = tl.gather(tile, (row - distance) & (BLOCK - 1), 1)
    near = tl.sum(tl.where(distance <= row, turned, 0.0), 0)
    far = tl.sum(tl.where(distance > row, turned, 0.0), 0)
    tl.store(sums + tl.arange(0, BLOCK), near)
    tl.store(sums + BLOCK + tl.arange(0, BLOCK), far)
