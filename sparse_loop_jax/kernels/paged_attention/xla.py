"""Dense attention over paged K/V in plain JAX: the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.paged_attention.op import paged_attention


@paged_attention.register("xla")
def paged_attention_xla(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """Attention of each row over the first `lengths` tokens of its request.

    Args:
      q: `[B, n, heads, head_dim]`; n rows per request (1 for a decode step, K+1 for a
        verification, a chunk for a prefill), which share the request's pages.
      k_pool, v_pool: `[pages, kv_heads, page_size, head_dim]` of one layer.
      page_table: int32 `[B, max_pages]`; page ids of this loop's plane, in token order.
        Entries past a request's length may be anything.
      lengths: int32 `[B, n]`; keys visible to each row, 0 for a dead row, and no more than
        the table holds.

    Returns:
      `[B, n, heads, head_dim]` in the dtype of q: softmax(q k / sqrt(head_dim)) v with
      scores, softmax and sums in float32. Dead rows give zeros. Nothing beyond a row's
      length is read into the result, whatever it holds; where a visible value is not
      finite, the row's heads that share it are NaN. (A kernel may keep the columns that such
      a value is not in, and give what the sum gives, infinity or NaN, in the one that it is.)
    """
    batch, rows, heads, dim = q.shape
    k = gather_pages(k_pool, page_table)  # [B, S, kv_heads, head_dim]
    v = gather_pages(v_pool, page_table)
    kv_heads, span = k.shape[2], k.shape[1]
    positions = jnp.arange(span, dtype=jnp.int32)
    visible = positions[None, None] < lengths[..., None]  # [B, n, S]
    # Zero times NaN is NaN, and a row may see fewer keys than its neighbour: what is not
    # finite stays out of the product and comes back only in the rows that see it.
    finite = jnp.isfinite(v).all(axis=-1)  # [B, S, kv_heads]
    never = jnp.iinfo(jnp.int32).max
    first_bad = jnp.min(jnp.where(finite, never, positions[None, :, None]), axis=1)
    poisoned = first_bad[:, None] < lengths[..., None]  # [B, n, kv_heads]
    v = jnp.where(finite[..., None], v.astype(jnp.float32), 0)
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    scores = _product("bnkgd,bskd->bkgns", grouped, k) * dim**-0.5
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    # A maximum and a sum of the exponentials would be fused with them, and XLA on the CPU
    # then picks another exponential and another order by the size of the batch. A position
    # and a product keep a request's bits the same alone, in a batch and under a wider table.
    # Two columns of ones: a product with one is rewritten into the sum to be avoided.
    top = jnp.take_along_axis(scores, jnp.argmax(scores, axis=-1, keepdims=True), axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
    total = _product("bkgns,bskd->bnkgd", weights, jnp.ones((*v.shape[:3], 2), v.dtype))
    out = _product("bkgns,bskd->bnkgd", weights, v)
    out = out / jnp.where(total == 0, 1, total)[..., :1]
    out = jnp.where(poisoned[..., None, None], jnp.nan, out)
    return out.reshape(batch, rows, heads, dim).astype(q.dtype)


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """An einsum summed in float32; float32 factors are not rounded to TF32."""
    return jnp.einsum(
        subscripts,
        left,
        right,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def gather_pages(pool: jax.Array, page_table: jax.Array) -> jax.Array:
    """Tokens of each request in order: `[B, max_pages * page_size, kv_heads, head_dim]`.

    Ids past the pool are clamped; the caller masks by length.
    """
    pages = pool.at[page_table].get(mode="clip")  # [B, max_pages, kv_heads, page, dim]
    batch, count, kv_heads, size, dim = pages.shape
    return pages.swapaxes(2, 3).reshape(batch, count * size, kv_heads, dim)
