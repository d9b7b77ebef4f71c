"""Mass and values of the kept keys of a captured row: the kernels, in Triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from sparse_loop_jax.kernels.sparse_attention.triton_gather import (
    ROWS,
    kept_positions,
    locate,
    only_row,
    piece_keys,
    pool_row,
    weigh,
)


@triton.jit
def weigh_kernel(
    v_ptr,  # [PAGES, KV_HEADS, SIZE, DIM]
    table_ptr,  # int32 [B, MAX_PAGES]
    positions_ptr,  # uint16 or uint32 [B, N, HEADS, CAPACITY]
    lengths_ptr,  # int32 [B, N]
    counts_ptr,  # int32 [B, N]
    scores_ptr,  # float32 [B, N, HEADS, MAX_PAGES * SIZE], base 2
    top_ptr,  # float32 [B, N, HEADS]
    total_ptr,  # float32 [B, N, HEADS]
    kept_ptr,  # float32 [B, N, HEADS, SPLITS, DIM]
    mass_ptr,  # float32 [B, N, HEADS, SPLITS]
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
    """Grid of `locate`: sums of `p_j` and `p_j V_j` over a piece of the kept keys.

    The only piece is always written; of several, those that hold a key.
    """
    b, row, kv_head, index = locate(N, HEADS, KV_HEADS)
    piece = tl.program_id(1)
    count = _kept_count(lengths_ptr, counts_ptr, b * N + row, CAPACITY)
    share = piece_keys(count, BLOCK, SPLITS)
    start = piece * share
    if (start < count) | (SPLITS == 1):
        end = tl.minimum(start + share, count)
        LIMIT: tl.constexpr = MAX_PAGES * SIZE
        positions_ptr += index.to(tl.int64) * CAPACITY
        scores_ptr += index.to(tl.int64) * LIMIT
        table_ptr += b * MAX_PAGES
        flat = tl.arange(0, DIM)
        within = tl.arange(0, BLOCK)
        first = tl.arange(0, ROWS)[None, :] == 0
        top = tl.load(top_ptr + index)
        total = tl.load(total_ptr + index)

        mass = tl.zeros((BLOCK,), tl.float32)
        acc = tl.zeros((DIM, ROWS), tl.float32)
        ahead = kept_positions(positions_ptr, start, 1, end, LIMIT, BLOCK)
        position = kept_positions(positions_ptr, start, 0, end, LIMIT, BLOCK)
        vector = pool_row(table_ptr, position, kv_head, PAGES, KV_HEADS, SIZE)
        score = tl.load(scores_ptr + position)
        for i in range((end - start + BLOCK - 1) // BLOCK):
            after = kept_positions(positions_ptr, start, i + 2, end, LIMIT, BLOCK)
            next_vector = pool_row(table_ptr, ahead, kv_head, PAGES, KV_HEADS, SIZE)
            next_score = tl.load(scores_ptr + ahead)
            live = start + i * BLOCK + within < end
            weights = tl.where(live, tl.exp2(score - top) / total, 0.0)
            offset = vector.to(tl.int64) * DIM
            v = tl.load(v_ptr + (offset[None, :] + flat[:, None]))
            # The result stays float32, unlike that of an attention: so do the weights.
            acc += weigh(v, tl.where(first, weights[:, None], 0.0), 3)
            mass += weights
            vector = next_vector
            score = next_score
            ahead = after
        out = index * SPLITS + piece
        tl.store(kept_ptr + out.to(tl.int64) * DIM + flat, only_row(acc, 1))
        tl.store(mass_ptr + out, tl.sum(mass, axis=0))


@triton.jit
def sum_kernel(
    kept_pieces_ptr,  # float32 [B, N, HEADS, SPLITS, DIM]
    mass_pieces_ptr,  # float32 [B, N, HEADS, SPLITS]
    lengths_ptr,  # int32 [B, N]
    counts_ptr,  # int32 [B, N]
    kept_ptr,  # float32 [B, N, HEADS, DIM]
    mass_ptr,  # float32 [B, N, HEADS]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,  # SPLITS, up to a power of two
):
    """Grid (B * N * HEADS,): adds up the pieces of `weigh_kernel`."""
    index = tl.program_id(0)
    count = _kept_count(lengths_ptr, counts_ptr, index // HEADS, CAPACITY)
    piece = tl.arange(0, PIECES)
    # Pieces past the end were never written.
    live = (piece < SPLITS) & (piece * piece_keys(count, BLOCK, SPLITS) < count)
    at = index * SPLITS + piece
    flat = tl.arange(0, DIM)
    mass = tl.load(mass_pieces_ptr + at, mask=live, other=0.0)
    vectors = at.to(tl.int64)[:, None] * DIM + flat[None, :]
    kept = tl.load(kept_pieces_ptr + vectors, mask=live[:, None], other=0.0)
    tl.store(kept_ptr + index.to(tl.int64) * DIM + flat, tl.sum(kept, axis=0))
    tl.store(mass_ptr + index, tl.sum(mass, axis=0))


@triton.jit
def _kept_count(lengths_ptr, counts_ptr, at, CAPACITY: tl.constexpr):
    """How many keys `select_keys` kept of the row."""
    most = tl.minimum(tl.maximum(tl.load(lengths_ptr + at), 0), CAPACITY)
    return tl.minimum(tl.maximum(tl.load(counts_ptr + at), 0), most)
