"""Attention of a chunk as a Mosaic GPU kernel, for Hopper."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import pallas_mosaic, pallas_triton
from sparse_loop_jax.kernels.prefill_attention.op import prefill_attention

TILE = 128  # rows of one program at a time
HEAD_DIMS = (64, 128)
PAGE_SIZES = (8, 16, 32, 64, 128)


@prefill_attention.register("mosaic")
def prefill_attention_mosaic(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """`prefill_attention` in one launch, 128 rows of a head at a time.

    A row's result depends on the 128 rows it is computed with (which of their keys all of
    them see), not on other rows, heads or requests.

    Raises:
      NotImplementedError: no Hopper, a JAX older than 0.11, or a dtype, head size, page size
        or number of rows that the kernel does not serve.
      ValueError: shapes that do not fit each other.
    """
    pallas_mosaic.require_hopper()
    batch, rows, heads, dim = q.shape
    _, kv_heads, size, _ = k_pool.shape
    if k_pool.shape != v_pool.shape or k_pool.shape[3] != dim or heads % kv_heads:
        raise ValueError(f"q {q.shape} does not fit pools {k_pool.shape} and {v_pool.shape}")
    if lengths.shape != (batch, rows) or page_table.shape[0] != batch:
        raise ValueError(
            f"lengths must be [{batch}, {rows}] and the page table [{batch}, pages], got "
            f"{lengths.shape} and {page_table.shape}"
        )
    dtypes = {array.dtype for array in (q, k_pool, v_pool)}
    if len(dtypes) > 1 or dtypes.isdisjoint({jnp.dtype("bfloat16"), jnp.dtype("float16")}):
        names = sorted(map(str, dtypes))
        raise NotImplementedError(f"q and the pools must be all bfloat16 or float16: {names}")
    if dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim must be one of {HEAD_DIMS}, got {dim}")
    if size not in PAGE_SIZES:
        raise NotImplementedError(f"page_size must be one of {PAGE_SIZES}, got {size}")
    if batch == 0 or rows == 0 or rows % TILE:
        raise NotImplementedError(
            f"rows must be a multiple of {TILE}, of one request at least: {batch} x {rows}"
        )
    return _run(
        q,
        k_pool,
        v_pool,
        page_table,
        lengths,
        interpret=pallas_triton.interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def _run(q, k_pool, v_pool, page_table, lengths, *, interpret: bool):
    from sparse_loop_jax.kernels.prefill_attention import mosaic_kernel

    batch, rows = lengths.shape
    size = k_pool.shape[2]
    limits = jnp.clip(lengths, 0, page_table.shape[1] * size)
    tiles = limits.reshape(batch, rows // TILE, TILE)
    top = tiles.max(axis=-1)
    # What every live row of a tile sees; a dead one computes there too, and is dropped.
    common = jnp.where(tiles > 0, tiles, top[..., None]).min(axis=-1)
    table = _readable(page_table, top.max(axis=1), k_pool.shape[0], size)
    return mosaic_kernel.launch(
        q,
        k_pool,
        v_pool,
        table,
        limits,
        common,
        top,
        interpret=interpret,
    )


def _readable(page_table, tokens, pages: int, size: int) -> jax.Array:
    """The table with an id of a page in every entry, as wide as whole blocks of keys.

    What stands for an unused entry is the last used page of its request, so that a whole
    block can be read, of the request's own pages, before it is known how much of it is used.
    """
    table = jnp.clip(page_table, 0, pages - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (TILE // size))))
    last = jnp.maximum((tokens - 1) // size, 0)[:, None]
    used = jnp.arange(table.shape[1], dtype=jnp.int32)[None] <= last
    return jnp.where(used, table, jnp.take_along_axis(table, last, axis=1))
