"""Sparse decode attention as Triton kernels, at most two launches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import triton_call, tuning
from sparse_loop_jax.kernels.sparse_attention.cut import (
    GatherConfig,
    check_shapes,
    choose_config,
)
from sparse_loop_jax.kernels.sparse_attention.op import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.xla import take_rows


@sparse_attention.register("triton")
def sparse_attention_triton(
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
    config: GatherConfig | None = None,
) -> jax.Array:
    """`sparse_attention` through jax-triton, as the Pallas kernels do it.

    Args: as the reference, and
      config: how the work is cut; None: the one measured for the Pallas kernels at these
        shapes, else that of `choose_config`.

    Raises:
      NotImplementedError: there is no GPU or no jax-triton, or a head size or dtype that the
        kernels do not serve.
    """
    triton_call.require()
    from sparse_loop_jax.kernels.sparse_attention import triton_kernel as kernels

    if rows is not None:
        positions, mass, base = take_rows(rows, positions, mass, base)
    batch, width, heads, dim = q.shape
    pages, kv_heads, size, _ = k_pool.shape
    capacity = positions.shape[3]
    check_shapes(dim, q=q, k_pool=k_pool, v_pool=v_pool)
    if q.size == 0:
        return jnp.zeros_like(q)
    if config is None:
        computed = choose_config(batch * width * heads, capacity)
        config = tuning.tuned(
            "sparse_attention",
            functools.partial(dataclasses.replace, computed),
            batch=batch,
            rows=width,
            heads=heads,
            head_dim=dim,
            length=capacity,
            dtype=k_pool.dtype,
        )
    counts = counts.astype(jnp.int32)
    grid = (width * (heads // kv_heads), config.splits, batch * kv_heads)
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    shared = {"HEADS": heads, "DIM": dim, "CAPACITY": capacity, "BLOCK": config.block_keys}
    walk = shared | {
        "SCALE": dim**-0.5,
        "N": width,
        "KV_HEADS": kv_heads,
        "PAGES": pages,
        "SIZE": size,
        "MAX_PAGES": page_table.shape[1],
    }
    paged = (q, k_pool, v_pool, page_table, positions, counts)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if config.splits == 1:
        return triton_call.call(
            kernels.attend_kernel, *paged, mass, base,
            grid=grid, out_shape=out, name="sparse_attention", **launch, **walk,
        )  # fmt: skip
    stats = jax.ShapeDtypeStruct((batch, width, heads, config.splits), jnp.float32)
    acc = jax.ShapeDtypeStruct((*stats.shape, dim), jnp.float32)
    pieces = triton_call.call(
        kernels.attend_piece_kernel, *paged,
        grid=grid, out_shape=(acc, stats, stats), name="sparse_attention", **launch, **walk,
        SPLITS=config.splits,
    )  # fmt: skip
    return triton_call.call(
        kernels.merge_kernel, *pieces, counts, mass, base,
        grid=(batch * width * heads,), out_shape=out, name="sparse_attention_merge",
        num_warps=1, **shared, SPLITS=config.splits,
        PIECES=1 << (config.splits - 1).bit_length(),
    )  # fmt: skip
