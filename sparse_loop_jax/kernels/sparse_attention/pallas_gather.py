"""How kernels walk over the kept keys of one row and head.

The keys are cut into pieces, one program each. A program takes a block of keys at a time:
their positions, the pages that hold them, then their K and V. The first two are loaded steps
ahead, so that the loads of K and V depend on nothing in flight and the pipeline that Triton
builds for them stays full.

The products of one row run on the matrix units, where a row is padded to 8: they have
nothing else to do, and only loads that feed them are pipelined. Keys lie along the long axis
of every tile: scores are `[keys, ROWS]` and sums of values `[dim, ROWS]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.pallas_triton import load
from sparse_loop_jax.kernels.sparse_attention.cut import GatherConfig

ROWS = 8  # of a product; the first one is real


def piece_keys(count, config: GatherConfig):
    """Keys of each piece of a row that keeps `count`: equal, in whole blocks, at least one."""
    blocks = ceil_div(count, config.block_keys)
    return jnp.maximum(ceil_div(blocks, config.splits), 1) * config.block_keys


def over_kept(
    positions_ref, row, start, end, limit: int, config: GatherConfig, fetch, body, carry
):
    """`carry = body(live, fetched, carry)` for each block of the kept keys `start` to `end`.

    Args:
      positions_ref: [slots, heads, capacity].
      row: (slot, head).
      limit: positions are below it.
      fetch: a function from int32 positions `[block_keys]` to what is loaded for them one
        step ahead.
      body: `live` tells which keys of the block exist; the others repeat the last that does.
    """
    within = jax.lax.iota(jnp.int32, config.block_keys)
    last = jnp.maximum(end - 1, 0)

    def positions(step):
        slot = jnp.minimum(start + step * config.block_keys + within, last)
        position = load(positions_ref.at[(*row, slot)]).astype(jnp.uint32)
        # Where nothing is kept, an entry may be anything.
        return jnp.minimum(position, jnp.uint32(limit - 1)).astype(jnp.int32)

    def step(i, carry):
        ahead, fetched, carry = carry
        after = positions(i + 2)
        next_fetched = fetch(ahead)
        live = start + i * config.block_keys + within < end
        return after, next_fetched, body(live, fetched, carry)

    steps = ceil_div(jnp.maximum(end - start, 0), config.block_keys)
    carry = (positions(1), fetch(positions(0)), carry)
    return jax.lax.fori_loop(0, steps, step, carry)[2]


def place(table_ref, b, position, size: int, pages: int):
    """Page and token in its page of each position of request b."""
    page = load(table_ref.at[b, jax.lax.div(position, jnp.int32(size))])
    # An id past the pool has no page; any page is as good to read.
    return jnp.clip(page, 0, pages - 1), jax.lax.rem(position, jnp.int32(size))


def first_row(x):
    """`[dim]` as the first of `ROWS` rows, the others zero."""
    real = jax.lax.broadcasted_iota(jnp.int32, (ROWS, x.shape[0]), 0) == 0
    return jnp.where(real, x[None, :], jnp.zeros((), x.dtype))


def only_row(x):
    """The first column of `[..., ROWS]`, float32."""
    axis = x.ndim - 1
    real = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) == 0
    return jnp.sum(jnp.where(real, x, 0.0), axis=axis)


def dot(a, b, axes: tuple[int, int]):
    """Sums over an axis of a and one of b in float32; float32 inputs stay float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def weigh(v, weights, terms: int):
    """Values `[dim, keys]` summed by weight `[keys, ROWS]`.

    Weights are split into `terms` numbers of the dtype of V, each the rounding error of the
    one before: 8 bits of precision each in bfloat16.
    """
    out = jnp.zeros((v.shape[0], weights.shape[1]), jnp.float32)
    for _ in range(1 if v.dtype == jnp.float32 else terms):
        term = weights.astype(v.dtype)
        out += dot(v, term, (1, 0))
        weights -= term.astype(jnp.float32)
    return out


def ceil_div(a, b: int):
    return jax.lax.div(a + (b - 1), jnp.int32(b))
