"""Sparse decode attention over the kept keys of a row: the kernels, in Triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from sparse_loop_jax.kernels.sparse_attention.triton_gather import (
    ROWS,
    dot,
    kept_positions,
    locate,
    narrow,
    only_row,
    piece_keys,
    pool_row,
    weigh,
)

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is the hardware's exponential


@triton.jit
def attend_kernel(
    q_ptr,  # [B, N, HEADS, DIM]
    k_ptr,  # [PAGES, KV_HEADS, SIZE, DIM]
    v_ptr,  # [PAGES, KV_HEADS, SIZE, DIM]
    table_ptr,  # int32 [B, MAX_PAGES]
    positions_ptr,  # uint16 or uint32 [B, N, HEADS, CAPACITY]
    counts_ptr,  # int32 [B, N]
    mass_ptr,  # float32 [B, N, HEADS]
    base_ptr,  # float32 [B, N, HEADS, DIM]
    out_ptr,  # [B, N, HEADS, DIM]
    SCALE: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGES: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid of `locate` with one piece: all kept keys of a row and head."""
    b, row, kv_head, index = locate(N, HEADS, KV_HEADS)
    count = tl.minimum(tl.load(counts_ptr + b * N + row), CAPACITY)
    _, total, acc = _attend(
        q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, b, kv_head, index, 0, count,
        SCALE, KV_HEADS, DIM, PAGES, SIZE, MAX_PAGES, CAPACITY, BLOCK,
    )  # fmt: skip
    _finish(out_ptr, mass_ptr, base_ptr, index, acc / total, count, DIM)


@triton.jit
def attend_piece_kernel(
    q_ptr,  # to counts_ptr as in `attend_kernel`
    k_ptr,
    v_ptr,
    table_ptr,
    positions_ptr,
    counts_ptr,
    acc_ptr,  # float32 [B, N, HEADS, SPLITS, DIM], unnormalised
    top_ptr,  # float32 [B, N, HEADS, SPLITS]: the maximum of the base-2 scores
    total_ptr,  # float32 [B, N, HEADS, SPLITS]: the sum of the weights
    SCALE: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGES: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid of `locate`. Pieces past the end of a row's keys are not written."""
    b, row, kv_head, index = locate(N, HEADS, KV_HEADS)
    piece = tl.program_id(1)
    count = tl.minimum(tl.load(counts_ptr + b * N + row), CAPACITY)
    share = piece_keys(count, BLOCK, SPLITS)
    start = piece * share
    if start < count:
        top, total, acc = _attend(
            q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, b, kv_head, index, start,
            tl.minimum(start + share, count),
            SCALE, KV_HEADS, DIM, PAGES, SIZE, MAX_PAGES, CAPACITY, BLOCK,
        )  # fmt: skip
        out = index * SPLITS + piece
        tl.store(acc_ptr + out.to(tl.int64) * DIM + tl.arange(0, DIM), acc)
        tl.store(top_ptr + out, top)
        tl.store(total_ptr + out, total)


@triton.jit
def merge_kernel(
    acc_ptr,  # as `attend_piece_kernel` leaves them
    top_ptr,
    total_ptr,
    counts_ptr,  # int32 [B, N]
    mass_ptr,  # float32 [B, N, HEADS]
    base_ptr,  # float32 [B, N, HEADS, DIM]
    out_ptr,  # [B, N, HEADS, DIM]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,  # SPLITS, up to a power of two
):
    """Grid (B * N * HEADS,): adds up the pieces and corrects the reference."""
    index = tl.program_id(0)
    count = tl.minimum(tl.load(counts_ptr + index // HEADS), CAPACITY)
    piece = tl.arange(0, PIECES)
    # Pieces past the end were never written.
    live = (piece < SPLITS) & (piece * piece_keys(count, BLOCK, SPLITS) < count)
    at = index * SPLITS + piece
    top = tl.load(top_ptr + at, mask=live, other=float("-inf"))
    total = tl.load(total_ptr + at, mask=live, other=0.0)
    vectors = at.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    acc = tl.load(acc_ptr + vectors, mask=live[:, None], other=0.0)
    peak = tl.max(top, axis=0)
    weights = tl.exp2(top - tl.where(peak == float("-inf"), 0.0, peak))
    mean = tl.sum(acc * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
    _finish(out_ptr, mass_ptr, base_ptr, index, mean, count, DIM)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, b, kv_head, index, start, end,
    SCALE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr,
    SIZE: tl.constexpr, MAX_PAGES: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one row and head to its kept keys `start` to `end`.

    Returns the maximum of the base-2 scores, the sum of the weights and, unnormalised, the
    weighted sum of the values: float32 (), (), [DIM].
    """
    positions_ptr += index.to(tl.int64) * CAPACITY
    table_ptr += b * MAX_PAGES
    flat = tl.arange(0, DIM)
    within = tl.arange(0, BLOCK)
    LIMIT: tl.constexpr = MAX_PAGES * SIZE
    # Products are of the dtype that holds both.
    SAME: tl.constexpr = q_ptr.dtype.element_ty == k_ptr.dtype.element_ty
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty if SAME else tl.float32
    q = tl.load(q_ptr + index.to(tl.int64) * DIM + flat)
    q = tl.where(tl.arange(0, ROWS)[None, :] == 0, q[:, None], 0.0).to(DTYPE)  # [DIM, ROWS]

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((DIM, ROWS), tl.float32)
    ahead = kept_positions(positions_ptr, start, 1, end, LIMIT, BLOCK)
    position = kept_positions(positions_ptr, start, 0, end, LIMIT, BLOCK)
    vector = pool_row(table_ptr, position, kv_head, PAGES, KV_HEADS, SIZE)
    for i in range((end - start + BLOCK - 1) // BLOCK):
        after = kept_positions(positions_ptr, start, i + 2, end, LIMIT, BLOCK)
        next_vector = pool_row(table_ptr, ahead, kv_head, PAGES, KV_HEADS, SIZE)
        offset = vector.to(tl.int64) * DIM
        k = tl.load(k_ptr + (offset[:, None] + flat[None, :]))
        scores = dot(k.to(DTYPE), q) * (SCALE * LOG2E)
        live = start + i * BLOCK + within < end
        scores += tl.where(live, 0.0, float("-inf"))[:, None]
        peak = tl.maximum(top, tl.max(scores, axis=0))
        weights = tl.exp2(scores - peak[None, :])
        keep = tl.exp2(top - peak)
        total = total * keep + tl.sum(weights, axis=0)
        v = tl.load(v_ptr + (offset[None, :] + flat[:, None]))
        acc = acc * keep[None, :] + weigh(v, weights, 2)
        top = peak
        vector = next_vector
        ahead = after
    return only_row(top, 0), only_row(total, 0), only_row(acc, 1)


@triton.jit
def _finish(out_ptr, mass_ptr, base_ptr, index, mean, count, DIM: tl.constexpr):
    """Stores `base + mass * mean`, or zeros where nothing is kept."""
    at = index.to(tl.int64) * DIM + tl.arange(0, DIM)
    out = tl.load(base_ptr + at) + tl.load(mass_ptr + index) * mean
    out = tl.where(count > 0, out, 0.0)
    tl.store(out_ptr + at, narrow(out, out_ptr.dtype.element_ty))
