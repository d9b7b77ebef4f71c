"""The K/V write as one Pallas kernel: blocks of rows, whole heads, K and V at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels import pallas_triton
from sparse_loop_jax.kernels.kv_write.op import write_kv
from sparse_loop_jax.kernels.kv_write.places import place_rows
from sparse_loop_jax.kernels.pallas_triton import load, store

# Bytes in flight hide the latency: 32 rows of 128 bfloat16 are four 16-byte accesses of each
# of 128 threads, for K and for V.
BLOCK_ROWS = 32
NUM_WARPS = 4


@write_kv.register("pallas")
def write_kv_pallas(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`write_kv` in one launch, for any number of rows but none.

    Raises:
      NotImplementedError: there are no rows.
    """
    if k.shape[0] * k.shape[1] == 0:
        raise NotImplementedError(f"write_kv of no rows: {k.shape}")
    return _run(
        k_pool,
        v_pool,
        k,
        v,
        page_table,
        positions,
        live,
        interpret=pallas_triton.interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def _run(k_pool, v_pool, k, v, page_table, positions, live, *, interpret: bool):
    batch, rows, kv_heads, _ = k.shape
    block = min(BLOCK_ROWS, pl.next_power_of_2(batch * rows))
    # The same in every layer of a loop: XLA computes it once.
    page, token = place_rows(k_pool, page_table, positions, live)
    pools = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (k_pool, v_pool)]
    return tuple(
        pallas_triton.call(
            functools.partial(_kernel, block=block),
            grid=(kv_heads, pl.cdiv(batch * rows, block)),
            out_shape=pools,
            num_warps=NUM_WARPS,
            aliases={4: 0, 5: 1},
            interpret=interpret,
            name="write_kv",
        )(k, v, page, token, k_pool, v_pool)
    )


def _kernel(
    k_ref,  # [B, n, kv_heads, dim]
    v_ref,  # as k_ref
    page_ref,  # int32 [B, n], past the end for a row that writes nothing
    token_ref,  # int32 [B, n]
    k_in_ref,  # the pools' old names
    v_in_ref,
    k_pool_ref,  # [pages, kv_heads, page_size, dim]
    v_pool_ref,  # as k_pool_ref
    *,
    block: int,
):
    """Grid (kv_heads, blocks of rows): programs next to each other read whole rows."""
    del k_in_ref, v_in_ref
    dim = k_ref.shape[3]
    pages = k_pool_ref.shape[0]
    head = pl.program_id(0)
    line = pl.program_id(1) * block + jax.lax.iota(jnp.int32, block)
    _, b, i, page, token = read_places(page_ref, token_ref, line, pages)
    padded = pl.next_power_of_2(dim)
    column = jax.lax.iota(jnp.int32, padded)[None, :]
    mask = jnp.broadcast_to((page < pages)[:, None], (block, padded))
    if padded != dim:
        mask &= jnp.broadcast_to(column < dim, (block, padded))
    source = (b[:, None], i[:, None], head, column)
    target = (page[:, None], head, token[:, None], column)
    k = load(k_ref.at[source], mask=mask, other=0)
    v = load(v_ref.at[source], mask=mask, other=0)
    store(k_pool_ref.at[target], k.astype(k_pool_ref.dtype), mask=mask)
    store(v_pool_ref.at[target], v.astype(v_pool_ref.dtype), mask=mask)


def read_places(page_ref, token_ref, row, pages: int):
    """In a kernel: what `place_rows` gave for rows counted through the batch.

    Args:
      page_ref, token_ref: int32 `[B, n]`.
      row: int32 vector; from B n on it is padding.

    Returns:
      Whether a row is real, its request, its place in it, page and token. Padding has a
      request past the end, and as page `pages`.
    """
    batch, rows = page_ref.shape
    real = row < batch * rows
    b, i = row // rows, row % rows
    page = load(page_ref.at[b, i], mask=real, other=pages)
    return real, b, i, page, load(token_ref.at[b, i], mask=real, other=0)
