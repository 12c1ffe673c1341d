"""GPU kernels of `numerics: fast`. Sizes in capitals are compile-time constants; all sums are float32.

A row's result depends on that row only: one row (or one fixed tile) per program, splits of a context of a
fixed size, never of a fixed count. `torch_triton` launches them, `torch_plain` is their specification.
For the techniques: flash-decoding (Dao et al. 2023), paged attention (Kwon et al. 2023).
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0917 - kernel parameters are untyped pointers and constants
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rms_norm(x, delta, weight, total, out, width, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """Total = x + delta, out = total / rms(total) * weight; one row per program. Arrays are [rows, width]."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    offsets = row * width + columns
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
        stored = values.to(total.dtype.element_ty)
        tl.store(total + offsets, stored, mask=mask)
        values = stored.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / width
    scaled = (values * (1.0 / tl.sqrt(mean + epsilon))).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, (scaled * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate_store(
    qkv, cosine, sine, positions, writes, query, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotary positions and the paged store in one pass over [rows, heads + 2 kv heads, 2 HALF]; one head per program.

    Queries go to `query`, keys and values to their cache rows.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + lanes
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = tl.load(positions + row) * HALF + lanes
    cos = tl.load(cosine + angle, mask=mask, other=0.0)
    sin = tl.load(sine + angle, mask=mask, other=0.0)
    slot = tl.load(writes + row).to(tl.int64) * KV_HEADS
    if head < HEADS:
        place = query + (row * HEADS + head) * 2 * HALF + lanes
        tl.store(place, (low * cos - high * sin).to(query.dtype.element_ty), mask=mask)
        tl.store(place + HALF, (high * cos + low * sin).to(query.dtype.element_ty), mask=mask)
    elif head < HEADS + KV_HEADS:
        place = keys + (slot + head - HEADS) * 2 * HALF + lanes
        tl.store(place, (low * cos - high * sin).to(keys.dtype.element_ty), mask=mask)
        tl.store(place + HALF, (high * cos + low * sin).to(keys.dtype.element_ty), mask=mask)
    else:
        place = values + (slot + head - HEADS - KV_HEADS) * 2 * HALF + lanes
        tl.store(place, low.to(values.dtype.element_ty), mask=mask)
        tl.store(place + HALF, high.to(values.dtype.element_ty), mask=mask)


@triton.jit
def swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    """Out = gate / (1 + e^-gate) * up; `gate_up` is [rows, 2 width], a program has BLOCK columns of a row."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + row * 2 * width + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _read(cache, offsets, mask, UPCAST: tl.constexpr):
    """Operands of a product. The interpreter can't multiply bfloat16."""
    block = tl.load(cache + offsets, mask=mask, other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block


@triton.jit
def _attend_range(
    q, position, keys, values, table, kv_head, low, high, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted sum over the positions `low .. high - 1`: sum, largest score (powers of 2), sum of weights."""
    dims = tl.arange(0, DIMS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(low, high, KEYS):
        seen = start + tl.arange(0, KEYS)
        page = tl.load(table + seen // PAGE, mask=seen < high, other=0).to(tl.int64)
        slot = (page * PAGE + seen % PAGE) * KV_HEADS + kv_head
        offsets = slot[:, None] * HEAD_DIM + dims[None, :]
        mask = (seen < high)[:, None] & (dims < HEAD_DIM)[None, :]
        k = _read(keys, offsets, mask, UPCAST)
        v = _read(values, offsets, mask, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        is_visible = (seen < high)[None, :] & (seen[None, :] <= position[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Nothing visible yet: any finite number keeps -inf - -inf away.
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - safe_best)
        numerators = tl.exp2(scores - safe_best[:, None])
        weights = weights * shrink + tl.sum(numerators, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(numerators.to(v.dtype), v, input_precision="ieee")
        best = new_best
    return mixed, best, weights


@triton.jit
def paged_attention(
    query, keys, values, tables, tile_item, tile_row, tile_count, tile_position, out, largest, total,
    scale, table_width, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, PARTIAL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of consecutive positions of one item over its pages, for one K/V head.

    Tile t is rows `tile_row[t] ..` of `query` [rows, HEADS, HEAD_DIM], `tile_count[t]` positions from
    `tile_position[t]` on; the queries that share a K/V head are rows of one product. A row sees the
    positions up to its own. PARTIAL: a program covers the positions of one split of SPLIT and leaves its
    unnormalised sum, with the largest score (in powers of 2) and the sum of weights, in
    [rows, HEADS, splits(, HEAD_DIM)]; else it covers all and `out` is [rows, HEADS, HEAD_DIM].
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(tile_count + tile)
    first_position = tl.load(tile_position + tile)
    low = 0
    high = first_position + count
    if PARTIAL:
        low = split * SPLIT
        high = tl.minimum(low + SPLIT, high)
    lanes = tl.arange(0, ROWS)
    place = lanes // GROUP
    is_row = place < count
    position = first_position + place
    head_row = (tl.load(tile_row + tile) + place) * HEADS + kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, DIMS)
    is_dim = (dims < HEAD_DIM)[None, :]
    q = _read(query, head_row[:, None] * HEAD_DIM + dims[None, :], is_row[:, None] & is_dim, UPCAST)
    table = tables + tl.load(tile_item + tile) * table_width
    mixed, best, weights = _attend_range(
        q, position, keys, values, table, kv_head, low, high, scale,
        KV_HEADS, HEAD_DIM, DIMS, PAGE, ROWS, KEYS, UPCAST,
    )  # fmt: skip
    if PARTIAL:
        cell = head_row * splits + split
        has_seen = is_row & (low <= position)
        tl.store(largest + cell, best, mask=has_seen)
        tl.store(total + cell, weights, mask=has_seen)
        cells = out + cell[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
        tl.store(cells, mixed, mask=has_seen[:, None] & is_dim)
    else:
        result = (mixed / weights[:, None]).to(out.dtype.element_ty)
        tl.store(out + head_row[:, None] * HEAD_DIM + dims[None, :], result, mask=is_row[:, None] & is_dim)


@triton.jit
def reduce_splits(
    partial, largest, total, positions, out, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row and head, in their order, as far as the row's own context reaches."""
    row = tl.program_id(0)
    head_row = row * HEADS + tl.program_id(1)
    used = tl.load(positions + row) // SPLIT + 1
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    best = tl.full([], float("-inf"), tl.float32)
    weights = tl.zeros([], tl.float32)
    mixed = tl.zeros([DIMS], tl.float32)
    for split in range(used):
        cell = head_row * splits + split
        split_best = tl.load(largest + cell)
        new_best = tl.maximum(best, split_best)
        shrink = tl.exp2(best - new_best)
        grow = tl.exp2(split_best - new_best)
        part = tl.load(partial + cell.to(tl.int64) * HEAD_DIM + dims, mask=is_dim, other=0.0)
        mixed = mixed * shrink + part * grow
        weights = weights * shrink + tl.load(total + cell) * grow
        best = new_best
    tl.store(out + head_row * HEAD_DIM + dims, (mixed / weights).to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def linear(
    x, weight, out, rows, width, inner,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_INNER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Out[rows, width] = x[rows, inner] weight[width, inner]^T in fixed tiles, the inner axis in order.

    The tile never depends on the number of rows, so neither does a row's result.
    """
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lanes = tl.arange(0, BLOCK_INNER)
    left = x + row[:, None].to(tl.int64) * inner
    right = weight + column[None, :].to(tl.int64) * inner
    sums = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for start in range(0, inner, BLOCK_INNER):
        depth = start + lanes
        a = _read(left, depth[None, :], (row[:, None] < rows) & (depth[None, :] < inner), UPCAST)
        b = _read(right, depth[:, None], (column[None, :] < width) & (depth[:, None] < inner), UPCAST)
        sums += tl.dot(a, b, input_precision="ieee")
    place = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < width))
