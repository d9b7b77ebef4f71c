"""Mass and values of the kept keys of a captured row: the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels.pallas_triton import load, store
from sparse_loop_jax.kernels.sparse_attention.cut import GatherConfig
from sparse_loop_jax.kernels.sparse_attention.pallas_gather import (
    ROWS,
    only_row,
    over_kept,
    piece_keys,
    place,
    weigh,
)


def weigh_kernel(
    v_ref,  # [pages, kv_heads, page_size, dim]
    table_ref,  # int32 [B, max_pages]
    rows_ref,  # int32 [B, n], slots; past the end where there is none
    positions_ref,  # uint16 or uint32 [slots, heads, capacity]
    lengths_ref,  # int32 [B, n]
    counts_ref,  # int32 [B, n]
    scores_ref,  # float32 [B, n, heads, span], base 2
    top_ref,  # float32 [B, n, heads]
    total_ref,  # float32 [B, n, heads]
    *refs,  # where splits > 1: kept float32 [B, n, heads, splits, dim] and mass, without dim;
    #   else those of `_leave`
    config: GatherConfig,
):
    """Grid (n * group, splits, B * kv_heads): sums of `p_j` and `p_j V_j` over kept keys."""
    slots, heads, capacity = positions_ref.shape
    rows = rows_ref.shape[1]
    pages, kv_heads, size, dim = v_ref.shape
    x, piece, z = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, lane = jax.lax.rem(x, jnp.int32(rows)), jax.lax.div(x, jnp.int32(rows))
    b, kv_head = jax.lax.div(z, jnp.int32(kv_heads)), jax.lax.rem(z, jnp.int32(kv_heads))
    head = kv_head * (heads // kv_heads) + lane
    index = (b, row, head)

    slot, inside = _slot(rows_ref, b, row, slots)
    count = jnp.where(inside, _kept_count(lengths_ref, counts_ref, b, row, capacity), 0)
    share = piece_keys(count, config)
    start = piece * share
    end = jnp.minimum(start + share, count)
    flat = jax.lax.iota(jnp.int32, dim)
    top, total = top_ref[index], total_ref[index]
    first = jax.lax.broadcasted_iota(jnp.int32, (1, ROWS), 1) == 0

    def fetch(position):
        score = load(scores_ref.at[(*index, position)])
        return *place(table_ref, b, position, size, pages), score

    def body(live, fetched, carry):
        page, token, score = fetched
        mass, acc = carry
        weights = jnp.where(live, jnp.exp2(score - top) / total, 0.0)
        v = load(v_ref.at[page[None, :], kv_head, token[None, :], flat[:, None]])
        # The result stays float32, unlike that of an attention: so do the weights.
        acc += weigh(v, jnp.where(first, weights[:, None], 0.0), terms=3)
        return mass + weights, acc

    carry = (
        jnp.zeros((config.block_keys,), jnp.float32),
        jnp.zeros((dim, ROWS), jnp.float32),
    )
    limit = scores_ref.shape[3]
    carry = over_kept(
        positions_ref, (slot, head), start, end, limit, config, fetch, body, carry
    )
    mass, kept = jnp.sum(carry[0], axis=0), only_row(carry[1])
    if config.splits == 1:
        _leave(refs, index, slot, inside, flat, kept, mass)
    else:
        kept_ref, mass_ref = refs

        @pl.when(start < count)
        def _():
            store(kept_ref.at[(*index, piece, flat)], kept)
            mass_ref[(*index, piece)] = mass


def sum_kernel(
    kept_pieces_ref,  # float32 [B, n, heads, splits, dim]
    mass_pieces_ref,  # float32 [B, n, heads, splits]
    rows_ref,  # int32 [B, n], slots
    lengths_ref,  # int32 [B, n]
    counts_ref,  # int32 [B, n]
    *refs,  # those of `_leave`
    config: GatherConfig,
    capacity: int,
):
    """Grid (heads, n, B): adds up the pieces of `weigh_kernel`."""
    head, row, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    index = (b, row, head)
    slot, inside = _slot(rows_ref, b, row, refs[-1].shape[0])
    count = _kept_count(lengths_ref, counts_ref, b, row, capacity)
    piece = jax.lax.iota(jnp.int32, pl.next_power_of_2(config.splits))
    flat = jax.lax.iota(jnp.int32, kept_pieces_ref.shape[4])
    # Pieces past the end were never written.
    live = (piece < config.splits) & (piece * piece_keys(count, config) < count)
    mass = load(mass_pieces_ref.at[(*index, piece)], mask=live, other=0)
    kept = load(
        kept_pieces_ref.at[(*index, piece[:, None], flat[None, :])],
        mask=jnp.broadcast_to(live[:, None], (piece.shape[0], flat.shape[0])),
        other=0,
    )
    _leave(refs, index, slot, inside, flat, jnp.sum(kept, axis=0), jnp.sum(mass, axis=0))


def _leave(refs, index, slot, inside, flat, kept, mass):
    """Writes what the capture of one row and head leaves behind into its slot.

    Args:
      refs: kept float32 [slots, heads, dim] and mass float32 [slots, heads]; or O_ref
        [B, n, heads, dim] and, as inputs and as outputs, O_ref - C_ref and mass of the slots.
    """
    kept_ref, mass_ref = refs[-2:]
    head = index[-1]

    @pl.when(inside)
    def _():
        left = kept
        if len(refs) > 2:
            left = load(refs[0].at[(*index, flat)]).astype(jnp.float32) - kept
        store(kept_ref.at[slot, head, flat], left)
        mass_ref[slot, head] = mass


def _slot(rows_ref, b, row, slots: int):
    """The slot of a row, and whether there is one; any slot if not."""
    slot = rows_ref[b, row]
    inside = (slot >= 0) & (slot < slots)
    return jnp.where(inside, slot, 0), inside


def _kept_count(lengths_ref, counts_ref, b, row, capacity: int):
    """How many keys `select_keys` kept of the row."""
    most = jnp.minimum(jnp.maximum(lengths_ref[b, row], 0), capacity)
    return jnp.clip(counts_ref[b, row], 0, most)
