"""Sparse decode attention as Pallas kernels, at most two launches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import pallas_triton, tuning
from sparse_loop_jax.kernels.sparse_attention.cut import (
    GatherConfig,
    check_shapes,
    choose_config,
)
from sparse_loop_jax.kernels.sparse_attention.op import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.pallas_kernel import attend_kernel, merge_kernel


@sparse_attention.register("pallas")
def sparse_attention_pallas(
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
    """`sparse_attention` that reads each kept key once.

    Args: as the reference, and
      config: how the work is cut; None: the one measured for these shapes,
        else that of `choose_config`.

    Raises:
      NotImplementedError: a head size or dtype that the kernels do not serve.
    """
    batch, width, heads, dim = q.shape
    check_shapes(dim, q=q, k_pool=k_pool, v_pool=v_pool)
    if config is None:
        computed = choose_config(batch * width * heads, positions.shape[-1])
        config = tuning.tuned(
            "sparse_attention",
            functools.partial(dataclasses.replace, computed),
            batch=batch,
            rows=width,
            heads=heads,
            head_dim=dim,
            length=positions.shape[-1],
            dtype=k_pool.dtype,
        )
    if rows is None:
        rows = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
        positions, mass, base = (x.reshape(-1, *x.shape[2:]) for x in (positions, mass, base))
    return _run(
        q,
        k_pool,
        v_pool,
        page_table,
        rows,
        positions,
        counts.astype(jnp.int32),
        mass,
        base,
        config=config,
        interpret=pallas_triton.interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _run(
    q, k_pool, v_pool, page_table, rows, positions, counts, mass, base, *, config, interpret
):
    batch, width, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    stats = jax.ShapeDtypeStruct((batch, width, heads, config.splits), jnp.float32)
    acc = jax.ShapeDtypeStruct((*stats.shape, dim), jnp.float32)
    pieces = pallas_triton.call(
        functools.partial(attend_kernel, config=config),
        grid=(width * (heads // kv_heads), config.splits, batch * kv_heads),
        out_shape=out if config.splits == 1 else (acc, stats, stats),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="sparse_attention",
    )(q, k_pool, v_pool, page_table, rows, positions, counts, mass, base)
    if config.splits == 1:
        return pieces
    return pallas_triton.call(
        functools.partial(merge_kernel, config=config),
        grid=(heads, width, batch),
        out_shape=out,
        num_warps=1,
        interpret=interpret,
        name="sparse_attention_merge",
    )(*pieces, rows, counts, mass, base)
