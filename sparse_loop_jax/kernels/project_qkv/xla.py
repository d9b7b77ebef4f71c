"""The projection, rotation and K/V write in plain JAX: the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.kv_write.xla import write_kv_xla
from sparse_loop_jax.kernels.matvec.xla import linear_xla
from sparse_loop_jax.kernels.project_qkv.op import project_qkv


@project_qkv.register("xla")
def project_qkv_xla(
    x: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, rotated; keys, rotated, and values written into their pages.

    Args:
      x: `[B, n, K]`, normed rows.
      weight: `[(heads + 2 kv_heads) * head_dim, K]`: queries above keys above values.
      cos, sin: `[B, n, head_dim]`, the angles of each row; both halves are equal
        (half-split layout).
      k_pool, v_pool, page_table, positions, live: as in `write_kv`.

    Returns:
      The queries `[B, n, heads, head_dim]` in the dtype of x, and the two pools. The
      products are rounded to the dtype of x before they are rotated.
    """
    q, k, v = split_qkv(linear_xla(x, weight), k_pool.shape[1], k_pool.shape[3])
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, *write_kv_xla(k_pool, v_pool, k, v, page_table, positions, live)


def split_qkv(rows: jax.Array, kv_heads: int, dim: int) -> tuple[jax.Array, ...]:
    """Queries, keys and values `[B, n, any heads, dim]` of fused products `[B, n, any]`."""
    rows = rows.reshape(*rows.shape[:2], -1, dim)
    heads = rows.shape[2] - 2 * kv_heads
    q, k, v = jnp.split(rows, (heads, heads + kv_heads), axis=2)
    return q, k, v


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE of `x [B, n, heads, head_dim]` by angles `[B or 1, n, head_dim]` (half-split)."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * cos[..., None, :] + turned * sin[..., None, :]
