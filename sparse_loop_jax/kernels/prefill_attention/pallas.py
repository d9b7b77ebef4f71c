"""Attention of a chunk by the kernel of decoding, cut by rows."""

from __future__ import annotations

import jax

from sparse_loop_jax.kernels.paged_attention.pallas import paged_attention_pallas
from sparse_loop_jax.kernels.prefill_attention.op import prefill_attention


@prefill_attention.register("pallas")
def prefill_attention_pallas(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """`prefill_attention` for any number of rows, on any device that Triton serves.

    Raises:
      NotImplementedError: as `paged_attention_pallas`.
    """
    return paged_attention_pallas(q, k_pool, v_pool, page_table, lengths)
