"""Capturing attention over paged K/V in plain JAX: the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.capture_attention.op import (
    CaptureOutput,
    StoredCapture,
    capture_attention,
    capture_into,
)
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.paged_attention.xla import gather_pages
from sparse_loop_jax.kernels.select_keys import select_keys
from sparse_loop_jax.kernels.sparse_attention.rows import row_max, row_products, row_sum
from sparse_loop_jax.kernels.sparse_attention.xla import gather_keys


@capture_attention.register("xla")
def capture_attention_xla(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    *,
    capacity: int,
    index_dtype=jnp.uint16,
    sink_keys: int = 0,
    recent_keys: int = 0,
    dense_implementation: str | None = None,
) -> CaptureOutput:
    """Dense attention of each row, and the keys that got most of it.

    The capturing side of FlashLoop's cross-loop sparse decode attention (Yang and Liu,
    2026, arXiv 2609.29812): with `p` the softmax of a row over all its visible keys,
    `S` = the `counts` largest, `m = sum_S p_j` and `C_ref = sum_S p_j V_j`.

    Args:
      q: `[B, n, heads, head_dim]`.
      k_pool, v_pool: `[pages, kv_heads, page_size, head_dim]` of one layer.
      page_table: int32 `[B, max_pages]` of this loop's plane.
      lengths: int32 `[B, n]`; keys visible to each row, 0 for a dead row.
      counts: int32 `[B, n]`; keys to keep, between 1 and `min(lengths, capacity)` for a row
        that captures; 0 keeps nothing (mass 0, kept 0).
      capacity, index_dtype: as in `select_keys`.
      sink_keys, recent_keys: keys at the start and at the end of the context that are kept
        whatever their score; they count inside `counts`. Where counts is smaller than their
        sum, it wins: first the sinks from position 0 on, then the newest.
      dense_implementation: what `paged_attention` is asked for; None: its own order.

    Returns:
      A `CaptureOutput`. `out` is that of `paged_attention` bit for bit: capturing changes
      nothing of what goes on. The keys are chosen by their scaled float32 scores, because
      probabilities underflow to ties; ties, NaN and padding as in `select_keys`. Mass and
      kept are float32, from true probabilities, also of sinks and recent keys. Dead rows
      give zeros everywhere.
    """
    out = paged_attention(
        q, k_pool, v_pool, page_table, lengths, implementation=dense_implementation
    )
    # The barriers keep the compiler from sharing or fusing the dense op's arithmetic with
    # the second pass over the scores, which would change how the output rounds.
    out, q = jax.lax.optimization_barrier(out), jax.lax.optimization_barrier(q)
    scores = row_scores(q, k_pool, page_table, lengths)  # [B, n, heads, S]
    lead = scores.shape[:-1]
    span = scores.shape[-1]
    ranked = favour(scores, lengths, counts, sink_keys, recent_keys)
    positions = select_keys(
        ranked,
        jnp.broadcast_to(jnp.minimum(lengths, span)[..., None], lead),
        jnp.broadcast_to(counts[..., None], lead),
        capacity=capacity,
        index_dtype=index_dtype,
        implementation="xla",
    )
    kept = jax.lax.broadcasted_iota(jnp.int32, positions.shape, 3) < counts[..., None, None]
    weights = selected_probabilities(scores, positions, kept)
    values = gather_keys(v_pool, page_table, positions, kept)
    return CaptureOutput(
        out=out,
        positions=positions,
        mass=row_sum(weights),
        kept=row_products("bnhc,bnhcd->bnhd", weights, values),
    )


@capture_into.register("xla")
def capture_into_xla(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    mass: jax.Array,
    base: jax.Array,
    *,
    sink_keys: int = 0,
    recent_keys: int = 0,
    dense_implementation: str | None = None,
) -> StoredCapture:
    """`capture_attention` that writes the rows' references into those of a layer.

    Args: as there, and
      rows: int32 `[B, n]`, the slot of each row; what lies past the end is written nowhere.
        No two rows share a slot.
      positions: uint16 or uint32 `[slots, heads, capacity]`.
      mass: float32 `[slots, heads]`.
      base: float32 `[slots, heads, head_dim]`, `O_ref - C_ref` with O_ref as it is rounded in
        the output.

    Returns:
      A `StoredCapture`; every slot of no row is as it was bit for bit. The three arrays are
      updated in place where they are donated.
    """
    captured = capture_attention_xla(
        q, k_pool, v_pool, page_table, lengths, counts,
        capacity=positions.shape[-1],
        index_dtype=positions.dtype,
        sink_keys=sink_keys,
        recent_keys=recent_keys,
        dense_implementation=dense_implementation,
    )  # fmt: skip
    return store_rows(captured, rows, positions, mass, base)


def store_rows(captured: CaptureOutput, rows, positions, mass, base) -> StoredCapture:
    """The references of a layer with the captured ones in them; see `capture_into_xla`."""
    reference = captured.out.astype(jnp.float32) - captured.kept
    return StoredCapture(
        captured.out,
        write_rows(positions, rows, captured.positions),
        write_rows(mass, rows, captured.mass),
        write_rows(base, rows, reference),
    )


def write_rows(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """`array [slots, ...]` with `values [B, n, ...]` at `rows [B, n]`, unless past the end."""
    # What is dropped has places of its own, so that no two rows write to one place and the
    # write needs no atomics.
    beyond = array.shape[0] + jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape)
    target = jnp.where((rows >= 0) & (rows < array.shape[0]), rows, beyond)
    return array.at[target].set(values, mode="drop", unique_indices=True)


def row_scores(
    q: jax.Array, k_pool: jax.Array, page_table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Scaled float32 scores `[B, n, heads, max_pages * page_size]`, -inf past the length."""
    batch, rows, heads, dim = q.shape
    k = gather_pages(k_pool, page_table)  # [B, S, kv_heads, head_dim]
    span, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "bnkgd,bskd->bnkgs",
        grouped,
        k,
        precision=jax.lax.Precision.HIGHEST,  # float32 inputs must not become TF32
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(batch, rows, heads, span) * dim**-0.5
    visible = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3) < lengths[..., None, None]
    return jnp.where(visible, scores, -jnp.inf)


def selected_probabilities(
    scores: jax.Array, positions: jax.Array, kept: jax.Array
) -> jax.Array:
    """Probabilities of the kept positions under the softmax over all scores, float32.

    Args:
      scores: float32 `[B, n, heads, S]`, -inf where a row does not look.
      positions: integers `[B, n, heads, capacity]`, in range where `kept`.
      kept: bool, of the shape of `positions`; the others give zeros.
    """
    top = row_max(scores)
    top = jnp.where(jnp.isneginf(top), 0, top)  # a dead row sees nothing
    total = row_sum(jnp.exp(scores - top))[..., None]
    index = jnp.where(kept, positions.astype(jnp.int32), 0)
    chosen = jnp.take_along_axis(scores, index, axis=-1)
    return jnp.where(kept, jnp.exp(chosen - top) / jnp.where(total == 0, 1, total), 0)


def favour(scores, lengths, counts, sink_keys: int, recent_keys: int):
    """Scores with the sinks and the recent keys that fit the count raised to +inf."""
    if not sink_keys and not recent_keys:
        return scores
    position = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    sinks = jnp.minimum(sink_keys, counts)
    recent = jnp.minimum(recent_keys, counts - sinks)
    first_recent = (lengths - recent)[..., None, None]
    favoured = (position < sinks[..., None, None]) | (position >= first_recent)
    return jnp.where(favoured, jnp.inf, scores)
