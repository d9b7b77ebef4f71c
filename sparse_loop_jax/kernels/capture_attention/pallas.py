"""Capturing attention as Pallas kernels: dense attention, selection, the kept values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import pallas_triton
from sparse_loop_jax.kernels.capture_attention.op import CaptureOutput, capture_attention
from sparse_loop_jax.kernels.capture_attention.pallas_kernel import sum_kernel, weigh_kernel
from sparse_loop_jax.kernels.capture_attention.xla import favour
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.paged_attention.pallas import (
    ScoredAttention,
    scored_attention,
)
from sparse_loop_jax.kernels.registry import PREFERENCE
from sparse_loop_jax.kernels.select_keys.pallas import select_rows
from sparse_loop_jax.kernels.sparse_attention.cut import (
    GatherConfig,
    check_shapes,
    choose_config,
)


@capture_attention.register("pallas")
def capture_attention_pallas(
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
    """`capture_attention` whose dense pass leaves its scores behind for the selection.

    K and V are read once, the V of the kept keys once more. Sinks and recent keys cost a
    copy of the scores.

    Args: as the reference, and
      config: how gathering the kept values is cut; None: chosen by `choose_config`.

    Raises:
      NotImplementedError: a head size, page size or dtype that the kernels do not serve.
    """
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
    kept, mass = _weigh(
        v_pool,
        page_table,
        positions,
        lengths,
        counts,
        dense.scores,
        dense.top,
        dense.total,
        config=config,
        interpret=pallas_triton.interpreting(),
    )
    return CaptureOutput(out=dense.out, positions=positions, mass=mass, kept=kept)


def dense_pass(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    dense_implementation: str | None,
) -> ScoredAttention:
    """Dense attention with its scores, and as `out` what `paged_attention` gives bit for bit.

    Args: as `capture_attention`.
    """
    dense = scored_attention(q, k_pool, v_pool, page_table, lengths)
    if pallas_triton.interpreting() or not _is_pallas(dense_implementation):
        # Interpreted, two kernels become programs that need not round alike.
        out = paged_attention(
            q, k_pool, v_pool, page_table, lengths, implementation=dense_implementation
        )
        dense = dense._replace(out=out)
    return dense


def _is_pallas(name: str | None) -> bool:
    """Whether `paged_attention` asked for `name` runs the kernels that leave the scores."""
    order = PREFERENCE.get(jax.default_backend(), ("xla",)) if name is None else (name,)
    return next((n for n in order if n in paged_attention.implementations), None) == "pallas"


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _weigh(
    v_pool, page_table, positions, lengths, counts, scores, top, total, *, config, interpret
):
    batch, rows, heads, capacity = positions.shape
    kv_heads, dim = v_pool.shape[1], v_pool.shape[3]
    lead = (batch, rows, heads)

    def shapes(*lead):
        kept = jax.ShapeDtypeStruct((*lead, dim), jnp.float32)
        return kept, jax.ShapeDtypeStruct(lead, jnp.float32)

    pieces = pallas_triton.call(
        functools.partial(weigh_kernel, config=config),
        grid=(rows * (heads // kv_heads), config.splits, batch * kv_heads),
        out_shape=shapes(*lead) if config.splits == 1 else shapes(*lead, config.splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="weigh_kept",
    )(v_pool, page_table, positions, lengths, counts, scores, top, total)
    if config.splits == 1:
        return pieces
    return pallas_triton.call(
        functools.partial(sum_kernel, config=config, capacity=capacity),
        grid=(heads, rows, batch),
        out_shape=shapes(*lead),
        num_warps=1,
        interpret=interpret,
        name="weigh_kept_sum",
    )(*pieces, lengths, counts)
