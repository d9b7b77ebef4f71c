"""Paged attention as Pallas kernels: decoding, verification and prefill."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels import pallas_triton, tuning
from sparse_loop_jax.kernels.paged_attention.op import paged_attention
from sparse_loop_jax.kernels.paged_attention.pallas_merge import merge_kernel
from sparse_loop_jax.kernels.paged_attention.pallas_split import SplitConfig, split_kernel

HEAD_DIMS = (16, 32, 64, 128)
# Queries that share a page, beyond which it is a prefill, cut by queries and not by keys.
FEW_QUERIES = 32


@paged_attention.register("pallas")
def paged_attention_pallas(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    config: SplitConfig | None = None,
) -> jax.Array:
    """`paged_attention` by split kernels, at most two launches.

    Each page of a request is read once for all queries that a program holds. The pieces of
    a context are cut by its own length and by shapes alone: a row gives the same bits
    whatever the rest of its batch holds, and at every repeat.

    Args: as the reference, and
      config: how the work is cut; None: `find_config`'s.

    Raises:
      NotImplementedError: a head size, page size or dtype that the kernels do not serve.
    """
    config = _serve(q, k_pool, v_pool, page_table, config)
    return _run(
        q,
        k_pool,
        v_pool,
        page_table,
        lengths,
        config=config,
        interpret=pallas_triton.interpreting(),
    )


class ScoredAttention(NamedTuple):
    """The output of `paged_attention` and what it was made of."""

    out: jax.Array  # [B, n, heads, head_dim] in the dtype of q
    # float32 [B, n, heads, max_pages * page_size]: q k log2(e) / sqrt(head_dim); nothing is
    # written at or past a row's length
    scores: jax.Array
    top: jax.Array  # float32 [B, n, heads]: the largest score
    total: jax.Array  # float32 [B, n, heads]: the sum of exp2(scores - top)


def scored_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    config: SplitConfig | None = None,
) -> ScoredAttention:
    """`paged_attention_pallas` that also leaves its scores; the output has the same bits.

    Args and errors as there.
    """
    config = _serve(q, k_pool, v_pool, page_table, config)
    out = _run(
        q,
        k_pool,
        v_pool,
        page_table,
        lengths,
        config=config,
        interpret=pallas_triton.interpreting(),
        scored=True,
    )
    return ScoredAttention(*out)


def _serve(q, k_pool, v_pool, page_table, config: SplitConfig | None) -> SplitConfig:
    """The configuration to run with, once it is known that the kernels serve the arguments."""
    dim, size = q.shape[-1], k_pool.shape[2]
    if dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim must be one of {HEAD_DIMS}, got {dim}")
    if size & (size - 1):
        raise NotImplementedError(f"page_size must be a power of two, got {size}")
    for name, array in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"{name} must be a float of 2 or 4 bytes: {array.dtype}")
    if config is None:
        config = find_config(q.shape, k_pool.shape, page_table.shape[1], q.dtype)
    queries = q.shape[1] * (q.shape[2] // k_pool.shape[1])
    if config.splits > 1 and queries > config.block_rows:
        raise ValueError(f"{config} cuts the context and the {queries} queries: one at a time")
    return config


def find_config(q_shape, pool_shape, max_pages: int, dtype) -> SplitConfig:
    """The configuration measured for these shapes, else what `choose_config` computes.

    Of the measured ones too, only `block_rows` depends on the number of rows.
    """
    computed = choose_config(q_shape, pool_shape, max_pages, dtype)
    batch, rows, heads, dim = q_shape
    _, kv_heads, size, _ = pool_shape
    if rows * (heads // kv_heads) > FEW_QUERIES:
        return computed
    return tuning.tuned(
        "paged_attention",
        functools.partial(dataclasses.replace, computed),
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=dim,
        length=max_pages * size,
        dtype=dtype,
    )


def choose_config(q_shape, pool_shape, max_pages: int, dtype) -> SplitConfig:
    """A configuration computed from shapes, for where nothing was measured.

    A verification is cut as a decode step of the same batch is: its rows are summed in the
    same pieces, and differ from decoding by the rounding of a piece's last keys.
    """
    batch, rows, heads, _ = q_shape
    _, kv_heads, size, _ = pool_shape
    queries = rows * (heads // kv_heads)
    block_rows = min(max(pl.next_power_of_2(queries), 8), 64)
    wide = jnp.dtype(dtype).itemsize == 4
    if queries > FEW_QUERIES:
        return SplitConfig(
            block_rows=32 if wide else block_rows,
            block_keys=32 if wide else 64,
            splits=1,
            min_keys=64,
            num_warps=4,
            num_stages=3,
        )
    # About 512 programs fill the device, and a piece of fewer than 128 keys is all start and
    # end. A long context is cut anyway, for ragged batches. What is not cut, or hardly, is
    # long enough for a program of four warps; short pieces are better off with two.
    span = max_pages * size
    splits = max(-(-512 // (batch * kv_heads)), span // 8192)
    splits = max(min(splits, span // 128), 1)
    long = splits == 1 or span >= 4096 * splits
    return SplitConfig(
        block_rows=block_rows,
        block_keys=32 if wide else 64,
        splits=splits,
        min_keys=128,
        num_warps=4 if wide or long else 2,
        num_stages=3,
    )


@functools.partial(jax.jit, static_argnames=("config", "interpret", "scored"))
def _run(
    q,
    k_pool,
    v_pool,
    page_table,
    lengths,
    *,
    config: SplitConfig,
    interpret: bool,
    scored: bool = False,
):
    batch, rows, heads, dim = q.shape
    kv_heads, size = k_pool.shape[1:3]
    queries, span = rows * (heads // kv_heads), page_table.shape[1] * size
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    piece = jax.ShapeDtypeStruct((batch, kv_heads, config.splits, queries), jnp.float32)
    acc = jax.ShapeDtypeStruct((*piece.shape, dim), jnp.float32)
    row = jax.ShapeDtypeStruct((batch, rows, heads), jnp.float32)
    scores = jax.ShapeDtypeStruct((*row.shape, span), jnp.float32)
    whole = config.splits == 1
    row_stats = (row, row) if scored else ()
    pieces = pallas_triton.call(
        functools.partial(split_kernel, config=config, scored=scored),
        grid=(kv_heads, -(-queries // config.block_rows) if whole else config.splits, batch),
        out_shape=(
            *((out, *row_stats) if whole else (acc, piece, piece)),
            *((scores,) if scored else ()),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="scored_attention" if scored else "paged_attention",
    )(q, k_pool, v_pool, page_table, lengths)
    if whole:
        out, *row_stats = pieces[:3] if scored else pieces
    else:
        out, *row_stats = pallas_triton.call(
            functools.partial(merge_kernel, config=config, span=span),
            grid=(kv_heads, queries, batch),
            out_shape=(out, *row_stats),
            num_warps=4,
            interpret=interpret,
            name="paged_attention_merge",
        )(*pieces[:3], lengths)
    return (out, pieces[-1], *row_stats) if scored else out
