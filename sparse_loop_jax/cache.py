"""The paged K/V cache: one pool per layer, one plane per loop through the page table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.models.config import OuroConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """K and V of a batch of requests, as a pytree that steps update in place.

    The loops share each layer's pool: which pages hold a request's tokens in a given loop
    is what the page table says. Each layer has its own buffers, because a stacked one that
    a loop slices would be copied at every layer.
    """

    keys: tuple[jax.Array, ...]  # per layer [pages, kv_heads, page_size, head_dim]
    values: tuple[jax.Array, ...]  # the same
    # int32 [B, loops, max_pages]; ids in token order, `num_pages` where there is no page.
    page_table: jax.Array

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in (*self.keys, *self.values))


def create_cache(
    config: OuroConfig, page_table: np.ndarray, num_pages: int, page_size: int, dtype
) -> PagedKVCache:
    """An empty cache of `num_pages` pages a layer, with the given page table.

    Raises:
      ValueError: `page_size` is not a power of two, or the table does not fit.
    """
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    if page_table.ndim != 3 or page_table.shape[1] != config.total_ut_steps:
        raise ValueError(
            f"page_table must be [batch, {config.total_ut_steps} loops, pages], "
            f"got {page_table.shape}"
        )
    shape = (num_pages, config.num_key_value_heads, page_size, config.head_dim)
    layers = range(config.num_hidden_layers)
    return PagedKVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        page_table=jnp.asarray(page_table, jnp.int32),
    )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages of one plane that hold `tokens` tokens."""
    return -(-tokens // page_size)


def allocate_pages(
    tokens: Sequence[int], loops: int, page_size: int, max_pages: int, num_pages: int
) -> np.ndarray:
    """Hands each request exactly the pages it needs in every loop.

    Args:
      tokens: for each request, the tokens that its K/V must hold.
      max_pages: width of the table, at least the pages of the longest request.
      num_pages: size of the pool; also the id that marks "no page".

    Returns:
      int32 `[len(tokens), loops, max_pages]`.

    Raises:
      ValueError: the pool or the table is too small; the message has both numbers.
    """
    needs = [pages_for(t, page_size) for t in tokens]
    total = sum(needs) * loops
    if total > num_pages:
        raise ValueError(f"requests need {total} pages and the cache has {num_pages}")
    if max(needs, default=0) > max_pages:
        raise ValueError(f"a request needs {max(needs)} pages and the table has {max_pages}")
    table = np.full((len(needs), loops, max_pages), num_pages, np.int32)
    first = 0
    for row, need in enumerate(needs):
        ids = np.arange(first, first + need * loops, dtype=np.int32)
        table[row, :, :need] = ids.reshape(loops, need)
        first += need * loops
    return table
