"""Where a row of K and V goes."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def place_rows(
    k_pool: jax.Array, page_table: jax.Array, positions: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Page and token in it of each row; arguments as in `write_kv`.

    Returns:
      Two int32 `[B, n]`. The page is the number of pages, one past the end, for a row that
      writes nothing: -1 would wrap to the last page.
    """
    pages, _, size, _ = k_pool.shape
    slot = positions // size
    inside = live & (positions >= 0) & (slot < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.where(inside, slot, 0), axis=1)
    page = jnp.where(inside & (page >= 0) & (page < pages), page, pages)
    return page, positions % size
