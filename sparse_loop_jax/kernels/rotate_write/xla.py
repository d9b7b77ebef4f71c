"""Rotation and K/V write in plain JAX: the reference."""

from __future__ import annotations

import jax

from sparse_loop_jax.kernels.kv_write.xla import write_kv_xla
from sparse_loop_jax.kernels.project_qkv.xla import rotate, split_qkv
from sparse_loop_jax.kernels.rotate_write.op import rotate_write


@rotate_write.register("xla")
def rotate_write_xla(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `project_qkv` does after its product.

    Args:
      qkv: `[B, n, (heads + 2 kv_heads) * head_dim]`: queries, keys, values.
      cos, sin, k_pool, v_pool, page_table, positions, live: as in `project_qkv`.

    Returns:
      The queries, rotated, `[B, n, heads, head_dim]` in the dtype of qkv, and the two pools.
    """
    q, k, v = split_qkv(qkv, k_pool.shape[1], k_pool.shape[3])
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, *write_kv_xla(k_pool, v_pool, k, v, page_table, positions, live)
