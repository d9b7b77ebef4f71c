"""Sparse decode attention over the kept keys of a row: the kernels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels.pallas_triton import load, store
from sparse_loop_jax.kernels.sparse_attention.cut import GatherConfig
from sparse_loop_jax.kernels.sparse_attention.pallas_gather import (
    ROWS,
    dot,
    first_row,
    only_row,
    over_kept,
    piece_keys,
    place,
    weigh,
)

LOG2E = math.log2(math.e)  # exp2 is the hardware's exponential


def attend_kernel(
    q_ref,  # [B, n, heads, dim]
    k_ref,  # [pages, kv_heads, page_size, dim]
    v_ref,  # [pages, kv_heads, page_size, dim]
    table_ref,  # int32 [B, max_pages]
    rows_ref,  # int32 [B, n], slots
    positions_ref,  # uint16 or uint32 [slots, heads, capacity]
    counts_ref,  # int32 [B, n]
    mass_ref,  # float32 [slots, heads]
    base_ref,  # float32 [slots, heads, dim]
    *out_refs,  # out [B, n, heads, dim] where splits is 1, else
    #   acc float32 [B, n, heads, splits, dim], unnormalised, top and total float32
    #   [B, n, heads, splits]: the maximum of the base-2 scores and the sum of the weights
    config: GatherConfig,
):
    """Grid (n * group, splits, B * kv_heads), the rows of one request and head side by side.

    Rows of a verification keep much the same keys, and pieces of the same rank lie in much
    the same place: what programs running together share comes from the cache.
    """
    rows, heads, dim = q_ref.shape[1:]
    pages, kv_heads, size, _ = k_ref.shape
    x, piece, z = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, lane = jax.lax.rem(x, jnp.int32(rows)), jax.lax.div(x, jnp.int32(rows))
    b, kv_head = jax.lax.div(z, jnp.int32(kv_heads)), jax.lax.rem(z, jnp.int32(kv_heads))
    head = kv_head * (heads // kv_heads) + lane
    index = (b, row, head)

    slot = _slot(rows_ref, b, row, positions_ref.shape[0])
    count = jnp.minimum(counts_ref[b, row], positions_ref.shape[2])
    share = piece_keys(count, config)
    start = piece * share
    end = jnp.minimum(start + share, count)
    flat = jax.lax.iota(jnp.int32, dim)
    dtype = jnp.promote_types(q_ref.dtype, k_ref.dtype)
    q = first_row(load(q_ref.at[(*index, flat)]).astype(dtype))
    scale = dim**-0.5 * LOG2E

    def body(live, fetched, carry):
        page, token = fetched
        top, total, acc = carry
        k = load(k_ref.at[page[:, None], kv_head, token[:, None], flat[None, :]])
        scores = dot(k.astype(dtype), q, (1, 1)) * scale
        scores += jnp.where(live, 0.0, -jnp.inf)[:, None]
        peak = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.exp2(scores - peak[None, :])
        keep = jnp.exp2(top - peak)
        total = total * keep + jnp.sum(weights, axis=0)
        v = load(v_ref.at[page[None, :], kv_head, token[None, :], flat[:, None]])
        acc = acc * keep[None, :] + weigh(v.astype(dtype), weights, terms=2)
        return peak, total, acc

    carry = (
        jnp.full((ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        jnp.zeros((dim, ROWS), jnp.float32),
    )

    def fetch(position):
        return place(table_ref, b, position, size, pages)

    limit = table_ref.shape[1] * size
    kept = (slot, head)
    carry = over_kept(positions_ref, kept, start, end, limit, config, fetch, body, carry)
    top, total, acc = map(only_row, carry)
    if config.splits == 1:
        _finish(out_refs[0], index, slot, flat, acc / total, count, mass_ref, base_ref)
    else:
        acc_ref, top_ref, total_ref = out_refs

        @pl.when(start < count)
        def _():
            store(acc_ref.at[(*index, piece, flat)], acc)
            top_ref[(*index, piece)] = top
            total_ref[(*index, piece)] = total


def merge_kernel(
    acc_ref,  # as `attend_kernel` leaves them
    top_ref,
    total_ref,
    rows_ref,  # int32 [B, n], slots
    counts_ref,  # int32 [B, n]
    mass_ref,  # float32 [slots, heads]
    base_ref,  # float32 [slots, heads, dim]
    out_ref,  # [B, n, heads, dim]
    *,
    config: GatherConfig,
):
    """Grid (heads, n, B): adds up the pieces and corrects the reference."""
    head, row, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    index = (b, row, head)
    piece = jax.lax.iota(jnp.int32, pl.next_power_of_2(config.splits))
    flat = jax.lax.iota(jnp.int32, out_ref.shape[3])
    count = counts_ref[b, row]
    # Pieces past the end were never written.
    live = (piece < config.splits) & (piece * piece_keys(count, config) < count)
    top = load(top_ref.at[(*index, piece)], mask=live, other=-jnp.inf)
    total = load(total_ref.at[(*index, piece)], mask=live, other=0)
    acc = load(
        acc_ref.at[(*index, piece[:, None], flat[None, :])],
        mask=jnp.broadcast_to(live[:, None], (piece.shape[0], flat.shape[0])),
        other=0,
    )
    peak = jnp.max(top, axis=0)
    weights = jnp.exp2(top - jnp.where(peak == -jnp.inf, 0.0, peak))
    mean = jnp.sum(acc * weights[:, None], axis=0) / jnp.sum(total * weights, axis=0)
    slot = _slot(rows_ref, b, row, mass_ref.shape[0])
    _finish(out_ref, index, slot, flat, mean, count, mass_ref, base_ref)


def _slot(rows_ref, b, row, slots: int):
    """Where the reference of a row is. A row that keeps nothing may say anything."""
    return jnp.clip(rows_ref[b, row], 0, slots - 1)


def _finish(out_ref, index, slot, flat, mean, count, mass_ref, base_ref):
    """Stores `base + mass * mean`, or zeros where nothing is kept."""
    head = index[-1]
    out = load(base_ref.at[slot, head, flat]) + mass_ref[slot, head] * mean
    out = jnp.where(count > 0, out, 0.0)
    store(out_ref.at[(*index, flat)], out.astype(out_ref.dtype))
