"""How Triton kernels walk over the kept keys of one row and head.

As in `pallas_gather`: a piece of the keys for each program, a block of them at a time, their
positions loaded two steps ahead and their pages one, so that the loads of K and V depend on
nothing in flight. Products run on the matrix units with one row padded to ROWS; keys lie
along the long axis of every tile.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

ROWS = tl.constexpr(8)  # of a product; the first one is real
# Triton's interpreter multiplies bfloat16 by its bits and truncates to it: see below.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def locate(N: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Request, row, kv head and (request, row, head) as one index, of a program.

    Grid (N * group, splits, B * KV_HEADS), the rows of one request and head side by side.
    """
    x, z = tl.program_id(0), tl.program_id(2)
    b, kv_head = z // KV_HEADS, z % KV_HEADS
    row = x % N
    head = kv_head * (HEADS // KV_HEADS) + x // N
    return b, row, kv_head, (b * N + row) * HEADS + head


@triton.jit
def piece_keys(count, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of each piece of a row that keeps `count`: equal, in whole blocks, at least one."""
    blocks = (count + BLOCK - 1) // BLOCK
    return tl.maximum((blocks + SPLITS - 1) // SPLITS, 1) * BLOCK


@triton.jit
def kept_positions(positions_ptr, start, step, end, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of the block `step` of the kept keys `start` to `end`, int32 `[BLOCK]`.

    Past the end, the last that is kept again; where nothing is kept, any below LIMIT.
    """
    slot = start + step * BLOCK + tl.arange(0, BLOCK)
    slot = tl.minimum(slot, tl.maximum(end - 1, 0))
    position = tl.load(positions_ptr + slot).to(tl.uint32)
    return tl.minimum(position, LIMIT - 1).to(tl.int32)


@triton.jit
def pool_row(
    table_ptr,
    position,
    kv_head,
    PAGES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Where a position's vector begins in a pool, in vectors."""
    # An id past the pool has no page; any page is as good to read.
    page = tl.minimum(tl.maximum(tl.load(table_ptr + position // SIZE), 0), PAGES - 1)
    return (page * KV_HEADS + kv_head) * SIZE + position % SIZE


@triton.jit
def dot(a, b):
    """`a @ b` in float32; float32 inputs stay float32."""
    if INTERPRETED:  # products of two bfloat16 numbers are exact in float32
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to a dtype, to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def weigh(v, weights, TERMS: tl.constexpr):
    """Values `[dim, keys]` summed by weight `[keys, ROWS]`.

    Weights are split into TERMS numbers of the dtype of V, each the rounding error of the
    one before: 8 bits of precision each in bfloat16.
    """
    if v.dtype == tl.float32:
        out = dot(v, weights)
    else:
        out = tl.zeros((v.shape[0], ROWS), tl.float32)
        for _ in tl.static_range(TERMS):
            term = narrow(weights, v.dtype)
            out += dot(v, term)
            weights -= term.to(tl.float32)
    return out


@triton.jit
def only_row(x, axis: tl.constexpr):
    """The first along an axis of ROWS."""
    first = tl.arange(0, ROWS) == 0
    if axis == 1:
        first = first[None, :]
    return tl.sum(tl.where(first, x, 0.0), axis=axis)
