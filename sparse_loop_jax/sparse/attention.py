"""The attention of decoded rows in a layer that captures, consumes, or does both.

What the model calls: the ops of `sparse_loop_jax.kernels` and the store put together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.capture_attention import (
    CaptureOutput,
    capture_attention,
    capture_into,
)
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.sparse import store as reference_store
from sparse_loop_jax.sparse.config import (
    CAPTURE,
    CONSUME,
    CONSUME_AND_CAPTURE,
    SparseDecodeConfig,
)
from sparse_loop_jax.sparse.oracle import selection_mass
from sparse_loop_jax.sparse.pytrees import SparseDecodePlan, SparseDecodeReferenceStore


def attend_rows(
    mode: str,
    store: SparseDecodeReferenceStore,
    plan: SparseDecodePlan,
    layer: int,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    counts_table: jax.Array,
    *,
    config: SparseDecodeConfig,
    implementation: str | None = None,
    dense_implementation: str | None = None,
) -> tuple[jax.Array, SparseDecodeReferenceStore, jax.Array]:
    """`capture_rows`, `consume_rows` or `recapture_rows`, by a mode of `config.modes`.

    Returns:
      Attention `[B, n, heads, head_dim]` in the dtype of q, the store, refused `[B, n]`.

    Raises:
      ValueError: there is no such mode here ("dense" is not one).
    """
    paged = (q, k_pool, v_pool, page_table, lengths)
    if mode == CONSUME:
        out, refused = consume_rows(
            store, plan, layer, *paged, config=config, implementation=implementation
        )
        return out, store, refused
    rows = {CAPTURE: capture_rows, CONSUME_AND_CAPTURE: recapture_rows}.get(mode)
    if rows is None:
        raise ValueError(
            f"mode must be {CAPTURE!r}, {CONSUME!r} or {CONSUME_AND_CAPTURE!r}, got {mode!r}"
        )
    return rows(
        store,
        plan,
        layer,
        *paged,
        counts_table,
        config=config,
        implementation=implementation,
        dense_implementation=dense_implementation,
    )


def capture_rows(
    store: SparseDecodeReferenceStore,
    plan: SparseDecodePlan,
    layer: int,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    counts_table: jax.Array,
    *,
    config: SparseDecodeConfig,
    implementation: str | None = None,
    dense_implementation: str | None = None,
) -> tuple[jax.Array, SparseDecodeReferenceStore, jax.Array]:
    """Dense attention of the rows, whose references are kept.

    Args:
      plan: of `[B, n]` rows.
      layer: static.
      q, k_pool, v_pool, page_table, lengths: as in `paged_attention`.
      counts_table: int32 `[max_tokens + 1]`, k by N (`retained_counts`).
      implementation: of the capture; None: what the config says.
      dense_implementation: of the dense attention inside.

    Returns:
      `out`, the dense op's own output bit for bit, but zeros for refused rows; the store;
      and refused, bool `[B, n]`.
    """
    rows, refused = reference_store.targets(store, plan)
    # A refused row sees nothing, which gives zeros without another pass over the output.
    lengths = jnp.where(refused, 0, lengths)
    paged = (q, k_pool, v_pool, page_table, lengths)
    if config.mass_scaling == "none":
        captured, counts = _capture(
            store, plan, paged, counts_table, config, implementation, dense_implementation
        )
        base = _base(captured.out, captured, config)
        store, _ = reference_store.capture(
            store, plan, layer, counts, captured.positions, captured.mass, base
        )
        return captured.out, store, refused
    counts = _counts(plan, lengths, counts_table)
    out, *arrays = capture_into(
        *paged,
        counts,
        rows,
        store.positions[layer],
        store.mass[layer],
        store.base[layer],
        **_options(config, implementation, dense_implementation),
    )
    return out, reference_store.with_layer(store, layer, rows, counts, *arrays), refused


def consume_rows(
    store: SparseDecodeReferenceStore,
    plan: SparseDecodePlan,
    layer: int,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    config: SparseDecodeConfig,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows to their kept keys, as a correction of what was captured.

    Args:
      lengths: read by the "oracle" scaling only.

    Returns:
      `out` `[B, n, heads, head_dim]` in the dtype of q, zeros for dead and refused rows, and
      refused, bool `[B, n]`.
    """
    attend = functools.partial(
        sparse_attention,
        q,
        k_pool,
        v_pool,
        page_table,
        implementation=implementation or config.implementation,
    )
    if config.mass_scaling == "oracle":
        ref, refused = reference_store.consume(store, plan, layer)
        mass = selection_mass(q, k_pool, page_table, lengths, ref.positions, ref.count)
        return attend(ref.positions, ref.count, mass, ref.base), refused
    rows, counts, refused = reference_store.find(store, plan)
    mass = store.mass[layer]
    if config.mass_scaling == "none":
        mass = jnp.ones_like(mass)
    out = attend(store.positions[layer], counts, mass, store.base[layer], rows=rows)
    return out, refused


def recapture_rows(
    store: SparseDecodeReferenceStore,
    plan: SparseDecodePlan,
    layer: int,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    counts_table: jax.Array,
    *,
    config: SparseDecodeConfig,
    implementation: str | None = None,
    dense_implementation: str | None = None,
) -> tuple[jax.Array, SparseDecodeReferenceStore, jax.Array]:
    """Consumes, then captures this loop for the next: the "adjacent" variant.

    Keys, mass and C_ref come from this loop's dense scores; O_ref is the output that went
    on, which is the corrected one. Arguments and results as in `capture_rows`.
    """
    paged = (q, k_pool, v_pool, page_table, lengths)
    out, refused = consume_rows(
        store, plan, layer, *paged, config=config, implementation=implementation
    )
    plan = dataclasses.replace(plan, live=plan.live & ~refused)
    captured, counts = _capture(
        store, plan, paged, counts_table, config, implementation, dense_implementation
    )
    base = _base(out, captured, config)
    store, late = reference_store.capture(
        store, plan, layer, counts, captured.positions, captured.mass, base
    )
    return _without(late, out), store, refused | late


def _capture(
    store, plan, paged, counts_table, config, implementation, dense_implementation
) -> tuple[CaptureOutput, jax.Array]:
    counts = _counts(plan, paged[-1], counts_table)
    captured = capture_attention(
        *paged,
        counts,
        capacity=store.capacity,
        index_dtype=store.index_dtype,
        **_options(config, implementation, dense_implementation),
    )
    return captured, counts


def _counts(plan: SparseDecodePlan, lengths: jax.Array, counts_table: jax.Array) -> jax.Array:
    """Keys that each row keeps, int32 `[B, n]`."""
    return jnp.where(plan.live, counts_table.at[lengths].get(mode="clip"), 0)


def _options(config, implementation, dense_implementation) -> dict[str, Any]:
    """What every capture is asked for."""
    return {
        "sink_keys": config.sink_keys,
        "recent_keys": config.recent_keys,
        "dense_implementation": dense_implementation,
        "implementation": implementation or config.implementation,
    }


def _base(out: jax.Array, captured: CaptureOutput, config: SparseDecodeConfig) -> jax.Array:
    """O_ref minus the kept keys' part, in float32; O_ref is the output as rounded."""
    kept = captured.kept
    if config.mass_scaling == "none":
        mass = captured.mass[..., None]
        kept = kept / jnp.where(mass == 0, 1, mass)
    return out.astype(jnp.float32) - kept


def _without(refused: jax.Array, out: jax.Array) -> jax.Array:
    return jnp.where(refused[..., None, None], 0, out)
