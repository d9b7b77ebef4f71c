"""Sparse decode attention over paged K/V in plain JAX: the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.sparse_attention.op import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.rows import row_max, row_products, row_sum


@sparse_attention.register("xla")
def sparse_attention_xla(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    counts: jax.Array,
    mass: jax.Array,
    base: jax.Array,
    *,
    rows: jax.Array | None = None,
) -> jax.Array:
    """`base + mass * softmax_S(q K_S / sqrt(head_dim)) V_S` for each row and query head.

    The consuming side of FlashLoop's cross-loop sparse decode attention (Yang and Liu,
    2026, arXiv 2609.29812), with `base = O_ref - C_ref` and `mass = m` of the capturing
    loop.

    Args:
      q: `[B, n, heads, head_dim]`, the queries of the loop at hand.
      k_pool, v_pool: `[pages, kv_heads, page_size, head_dim]` of one layer.
      page_table: int32 `[B, max_pages]` of this loop's plane. Entries that no kept position
        needs may be anything.
      positions: uint16 or uint32 `[B, n, heads, capacity]`, token positions, ascending. One
        selection per query head, also where heads share a kv head (`h // group`). Entries at
        or past the row's count may be anything.
      counts: int32 `[B, n]`, kept keys of each row, at most capacity; 0 for a row that is
        dead or was refused.
      mass: float32 `[B, n, heads]`.
      base: float32 `[B, n, heads, head_dim]`.
      rows: int32 `[B, n]`: positions, mass and base are then those of all slots of a store,
        `[slots, ...]` in place of `[B, n, ...]`, and this is the slot of each row. Where the
        count is 0 it may be anything.

    Returns:
      `[B, n, heads, head_dim]` in the dtype of q; computed in float32 and rounded once. Rows
      with count 0 give zeros, whatever their mass and base hold. Only kept rows of the pools
      are gathered: what lies elsewhere, NaN included, changes nothing.
    """
    if rows is not None:
        positions, mass, base = take_rows(rows, positions, mass, base)
    kept = jax.lax.broadcasted_iota(jnp.int32, positions.shape, 3) < counts[..., None, None]
    k = gather_keys(k_pool, page_table, positions, kept)
    v = gather_keys(v_pool, page_table, positions, kept)
    scores = row_products("bnhd,bnhcd->bnhc", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(kept, scores, -jnp.inf)
    weights = jnp.where(kept, jnp.exp(scores - row_max(scores)), 0)
    mean = row_products("bnhc,bnhcd->bnhd", weights, v) / row_sum(weights)[..., None]
    out = base + mass[..., None] * mean
    return jnp.where(counts[..., None, None] > 0, out, 0).astype(q.dtype)


def take_rows(rows: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """`[B, n, ...]` of `[slots, ...]`, any slot where there is no such one."""
    return [array.at[rows].get(mode="clip") for array in arrays]


def gather_keys(
    pool: jax.Array, page_table: jax.Array, positions: jax.Array, kept: jax.Array
) -> jax.Array:
    """Rows of a pool at token positions: `[B, n, heads, capacity, head_dim]`.

    Args:
      pool: `[pages, kv_heads, page_size, head_dim]`.
      page_table: int32 `[B, max_pages]`.
      positions: integers `[B, n, heads, capacity]`.
      kept: bool, of the shape of `positions`; the others give zeros.
    """
    batch, _, heads, _ = positions.shape
    _, kv_heads, size, _ = pool.shape
    positions = jnp.where(kept, positions.astype(jnp.int32), 0)
    request = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    page = page_table.at[request, positions // size].get(mode="clip")
    head = jnp.arange(heads, dtype=jnp.int32)[None, None, :, None] // (heads // kv_heads)
    rows = pool.at[page, head, positions % size].get(mode="clip")
    # Zero times NaN is NaN: what is not kept is cleared, not only given no weight.
    return jnp.where(kept[..., None], rows, 0)
