"""The K/V write in plain JAX: the reference."""

from __future__ import annotations

import jax

from sparse_loop_jax.kernels.kv_write.op import write_kv
from sparse_loop_jax.kernels.kv_write.places import place_rows


@write_kv.register("xla")
def write_kv_xla(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes each live row's K and V at its position, in place where the pools are donated.

    Args:
      k_pool, v_pool: `[pages, kv_heads, page_size, head_dim]` of one layer.
      k, v: `[B, n, kv_heads, head_dim]`, any float dtype; rounded to the pools'.
      page_table: int32 `[B, max_pages]` of this loop's plane.
      positions: int32 `[B, n]`, the token position of each row within its request.
      live: bool `[B, n]`; dead rows write nothing.

    Returns:
      The two pools. Rows whose position has no page in the table write nothing either.
    """
    page, token = place_rows(k_pool, page_table, positions, live)
    index = (page, slice(None), token)
    k_pool = k_pool.at[index].set(k.astype(k_pool.dtype), mode="drop")
    v_pool = v_pool.at[index].set(v.astype(v_pool.dtype), mode="drop")
    return k_pool, v_pool
