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

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.pallas_triton import load

ROWS = 8  # of a product; the first one is real


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """How a kernel cuts the work.

    Attributes:
      block_keys: keys of one step of a program, a power of two of at least 16.
      splits: pieces of the kept keys, at most.
      num_warps, num_stages: warps of a program, tiles in flight.
    """

    block_keys: int = 32
    splits: int = 1
    num_warps: int = 1
    num_stages: int = 3

    def __post_init__(self):
        block = self.block_keys
        if block < 16 or block & (block - 1):
            raise ValueError(f"block_keys must be a power of two of at least 16, got {block}")
        if min(self.splits, self.num_warps, self.num_stages) < 1:
            raise ValueError(f"splits, num_warps and num_stages must be positive, got {self}")


def choose_config(rows: int, capacity: int) -> GatherConfig:
    """A configuration for `rows` selections (all rows and heads) of up to `capacity` keys.

    About 512 programs keep an H200 busy in one round, and a second round that is not full
    costs more than longer programs do.
    """
    return GatherConfig(splits=min(max(512 // rows, 1), -(-capacity // 32)))


def check_shapes(head_dim: int, **arrays: jax.Array) -> None:
    """Refuses what the kernels do not serve.

    Raises:
      NotImplementedError: it names the head size or the array and its dtype.
    """
    if head_dim not in (16, 32, 64, 128):
        raise NotImplementedError(f"head_dim must be 16, 32, 64 or 128, got {head_dim}")
    for name, array in arrays.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"{name} must be a float of 2 or 4 bytes: {array.dtype}")


def piece_keys(count, config: GatherConfig):
    """Keys of each piece of a row that keeps `count`: equal, in whole blocks, at least one."""
    blocks = ceil_div(count, config.block_keys)
    return jnp.maximum(ceil_div(blocks, config.splits), 1) * config.block_keys


def over_kept(
    positions_ref, row, start, end, limit: int, config: GatherConfig, fetch, body, carry
):
    """`carry = body(live, fetched, carry)` for each block of the kept keys `start` to `end`.

    Args:
      positions_ref: [B, n, heads, capacity].
      row: (request, row, head).
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
