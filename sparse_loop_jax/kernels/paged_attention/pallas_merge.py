"""Adding up the pieces that `pallas_split` left: one program per query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels.paged_attention.pallas_split import (
    SplitConfig,
    context_length,
    piece_keys,
)
from sparse_loop_jax.kernels.pallas_triton import load, release_next


def merge_kernel(
    acc_ref,  # float32 [B, kv_heads, splits, R, dim], unnormalised
    top_ref,  # float32 [B, kv_heads, splits, R], maximum of the base-2 scores
    total_ref,  # float32 [B, kv_heads, splits, R], sum of the weights
    lengths_ref,  # int32 [B, n]
    out_ref,  # [B, n, heads, dim]
    *stats_refs,  # top and total float32 [B, n, heads] of the whole context, if asked for
    config: SplitConfig,
    span: int,
):
    """Grid (kv_heads, R, B). `span` is the number of tokens that a page table holds."""
    head, query, b = release_next(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    heads, dim = out_ref.shape[2:]
    group = heads // acc_ref.shape[1]
    row, lane = query // group, head * group + query % group
    piece = jax.lax.iota(jnp.int32, pl.next_power_of_2(config.splits))
    flat = jax.lax.iota(jnp.int32, dim)

    length = context_length(lengths_ref, b, span)
    # Pieces past the end were never written.
    live = (piece < config.splits) & (piece * piece_keys(length, config) < length)
    top = load(top_ref.at[b, head, piece, query], mask=live, other=-jnp.inf)
    total = load(total_ref.at[b, head, piece, query], mask=live, other=0)
    acc = load(
        acc_ref.at[b, head, piece[:, None], query, flat[None, :]],
        mask=jnp.broadcast_to(live[:, None], (piece.shape[0], dim)),
        other=0,
    )
    peak = jnp.max(top, axis=0)
    weights = jnp.exp2(top - jnp.where(peak == -jnp.inf, 0.0, peak))
    seen = lengths_ref[b, row] > 0
    total = jnp.where(seen, jnp.sum(total * weights, axis=0), 1.0)
    out = jnp.where(seen, jnp.sum(acc * weights[:, None], axis=0) / total, 0.0)
    out_ref[b, row, lane, flat] = out.astype(out_ref.dtype)
    if stats_refs:
        stats_refs[0][b, row, lane] = peak
        stats_refs[1][b, row, lane] = total
