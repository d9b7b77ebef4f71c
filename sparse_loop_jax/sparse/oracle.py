"""The true mass of a selection, for research: it needs the dense scores that sparsity saves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.capture_attention.xla import row_scores, selected_probabilities
from sparse_loop_jax.kernels.sparse_attention.rows import row_sum


def selection_mass(
    q: jax.Array,
    k_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Probability of the kept keys under each row's dense softmax, float32 `[B, n, heads]`.

    Args:
      q, k_pool, page_table, lengths: as in `paged_attention`, of the loop at hand.
      positions: `[B, n, heads, capacity]`; entries at or past the count may be anything.
      counts: int32 `[B, n]`; rows with 0 give 0.
    """
    scores = row_scores(q, k_pool, page_table, lengths)
    entry = jax.lax.broadcasted_iota(jnp.int32, positions.shape, 3)
    return row_sum(selected_probabilities(scores, positions, entry < counts[..., None, None]))
