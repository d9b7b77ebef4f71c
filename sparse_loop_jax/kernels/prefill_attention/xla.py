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

    Products decide its time and not bytes, so it has kernels of its own. Arguments and
    result are those of `paged_attention`. A kernel rounds the softmax weights to the dtype of
    V, and its sums may be cut otherwise than those of decoding.
    """
    return paged_attention_xla(q, k_pool, v_pool, page_table, lengths)
