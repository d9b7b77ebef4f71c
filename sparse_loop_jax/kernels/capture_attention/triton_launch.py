"""Capturing attention whose selection and kept values come from Triton kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import triton_call
from sparse_loop_jax.kernels.capture_attention.op import (
    CaptureOutput,
    StoredCapture,
    capture_attention,
    capture_into,
)
from sparse_loop_jax.kernels.capture_attention.pallas import dense_pass
from sparse_loop_jax.kernels.capture_attention.xla import favour, store_rows
from sparse_loop_jax.kernels.select_keys.triton_launch import select_rows
from sparse_loop_jax.kernels.sparse_attention.cut import (
    GatherConfig,
    check_shapes,
    choose_config,
)


@capture_attention.register("triton")
def capture_attention_triton(
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
    config: GatherConfig | None = None,
) -> CaptureOutput:
    """`capture_attention` that selects and gathers through jax-triton.

    The dense pass that leaves the scores behind is the Pallas one: dense attention has no
    kernel in Triton itself.

    Args: as the reference, and
      config: how gathering the kept values is cut; None: chosen by `choose_config`.

    Raises:
      NotImplementedError: there is no GPU or no jax-triton, or a head size, page size or
        dtype that the kernels do not serve.
    """
    triton_call.require()
    batch, rows, heads, dim = q.shape
    check_shapes(dim, q=q, k_pool=k_pool, v_pool=v_pool)
    if config is None:
        config = choose_config(batch * rows * heads, capacity)
    dense = dense_pass(q, k_pool, v_pool, page_table, lengths, dense_implementation)
    lengths, counts = lengths.astype(jnp.int32), counts.astype(jnp.int32)
    positions = select_rows(
        favour(dense.scores, lengths, counts, sink_keys, recent_keys),
        lengths,
        counts,
        capacity=capacity,
        index_dtype=index_dtype,
    )
    kept, mass = _weigh(v_pool, page_table, positions, lengths, counts, dense, config)
    return CaptureOutput(out=dense.out, positions=positions, mass=mass, kept=kept)


@capture_into.register("triton")
def capture_into_triton(
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
    **options,
) -> StoredCapture:
    """`capture_into`: what `capture_attention_triton` gives, written by XLA.

    Args: as the reference.

    Raises:
      NotImplementedError: as `capture_attention_triton`.
    """
    captured = capture_attention_triton(
        q, k_pool, v_pool, page_table, lengths, counts,
        capacity=positions.shape[-1], index_dtype=positions.dtype, **options,
    )  # fmt: skip
    return store_rows(captured, rows, positions, mass, base)


def _weigh(v_pool, page_table, positions, lengths, counts, dense, config: GatherConfig):
    from sparse_loop_jax.kernels.capture_attention import triton_kernel as kernels

    batch, rows, heads, capacity = positions.shape
    pages, kv_heads, size, dim = v_pool.shape
    splits = config.splits

    def shapes(*lead):
        kept = jax.ShapeDtypeStruct((*lead, dim), jnp.float32)
        return kept, jax.ShapeDtypeStruct(lead, jnp.float32)

    lead = (batch, rows, heads)
    shared = {
        "HEADS": heads,
        "DIM": dim,
        "CAPACITY": capacity,
        "BLOCK": config.block_keys,
        "SPLITS": splits,
    }
    pieces = triton_call.call(
        kernels.weigh_kernel,
        v_pool,
        page_table,
        positions,
        lengths,
        counts,
        dense.scores,
        dense.top,
        dense.total,
        grid=(rows * (heads // kv_heads), splits, batch * kv_heads),
        out_shape=shapes(*lead) if splits == 1 else shapes(*lead, splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="weigh_kept",
        N=rows,
        KV_HEADS=kv_heads,
        PAGES=pages,
        SIZE=size,
        MAX_PAGES=page_table.shape[1],
        **shared,
    )
    if splits == 1:
        return pieces
    return triton_call.call(
        kernels.sum_kernel,
        *pieces,
        lengths,
        counts,
        grid=(batch * rows * heads,),
        out_shape=shapes(*lead),
        num_warps=1,
        name="weigh_kept_sum",
        PIECES=1 << (splits - 1).bit_length(),
        **shared,
    )
