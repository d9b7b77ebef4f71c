"""Attention of a chunk in plain JAX: the reference."""

from __future__ import annotations

import jax

from sparse_loop_jax.kernels.paged_attention.xla import paged_attention_xla
from sparse_loop_jax.kernels.prefill_attention.op import prefill_attention


@prefill_attention.register("xla")
def prefill_attention_xla(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """What `paged_attention` computes, for the many rows of a chunk of a prompt.

    Products decide its time and not bytes, so it has kernels of its own. They round the
    softmax weights to the dtype of V, and may cut sums otherwise than decoding does.

    Args:
      q: `[B, n, heads, head_dim]`; a chunk of each request's prompt.
      k_pool, v_pool: `[pages, kv_heads, page_size, head_dim]` of one layer.
      page_table: int32 `[B, max_pages]`; page ids of this loop's plane, in token order.
      lengths: int32 `[B, n]`; keys visible to each row, in any order; 0 for a dead row.

    Returns:
      `[B, n, heads, head_dim]` in the dtype of q, as `paged_attention` has it: dead rows are
      zeros, and nothing beyond a row's length is read into it.
    """
    return paged_attention_xla(q, k_pool, v_pool, page_table, lengths)
