"""Capturing attention as Pallas kernels: dense attention, selection, the kept values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import pallas_triton
from sparse_loop_jax.kernels.capture_attention.op import (
    CaptureOutput,
    StoredCapture,
    capture_attention,
    capture_into,
)
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
    batch, width, heads, dim = q.shape
    rows = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    dense, positions, kept, mass = _capture(
        (q, k_pool, v_pool, page_table, lengths, counts),
        rows,
        None,
        capacity=capacity,
        index_dtype=index_dtype,
        favoured=(sink_keys, recent_keys),
        dense_implementation=dense_implementation,
        config=config,
    )
    lead = (batch, width, heads)
    return CaptureOutput(
        out=dense.out,
        positions=positions.reshape(*lead, capacity),
        mass=mass.reshape(lead),
        kept=kept.reshape(*lead, dim),
    )


@capture_into.register("pallas")
def capture_into_pallas(
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
    config: GatherConfig | None = None,
) -> StoredCapture:
    """`capture_into` whose kernels write into the slots themselves.

    Args: as the reference, and
      config: as of `capture_attention_pallas`.

    Raises:
      NotImplementedError: as `capture_attention_pallas`.
    """
    dense, positions, base, mass = _capture(
        (q, k_pool, v_pool, page_table, lengths, counts),
        rows,
        (positions, base, mass),
        capacity=positions.shape[-1],
        index_dtype=positions.dtype,
        favoured=(sink_keys, recent_keys),
        dense_implementation=dense_implementation,
        config=config,
    )
    return StoredCapture(dense.out, positions, mass, base)


def _capture(
    paged, rows, into, *, capacity, index_dtype, favoured, dense_implementation, config
):
    """The dense pass, and positions, base and mass of `into` with the rows' in their slots.

    Where `into` is None: positions, kept and mass of all rows, slot by slot.
    """
    q, k_pool, v_pool, page_table, lengths, counts = paged
    batch, width, heads, dim = q.shape
    check_shapes(dim, q=q, k_pool=k_pool, v_pool=v_pool)
    if config is None:
        config = choose_config(batch * width * heads, capacity)
    dense = dense_pass(q, k_pool, v_pool, page_table, lengths, dense_implementation)
    lengths, counts = lengths.astype(jnp.int32), counts.astype(jnp.int32)
    positions = select_rows(
        favour(dense.scores, lengths, counts, *favoured),
        lengths,
        counts,
        capacity=capacity,
        index_dtype=index_dtype,
        into=None if into is None else (rows, into[0]),
    )
    kept, mass = _weigh(
        v_pool,
        page_table,
        rows,
        positions.reshape(-1, heads, capacity),
        lengths,
        counts,
        dense.scores,
        dense.top,
        dense.total,
        None if into is None else (dense.out, *into[1:]),
        config=config,
        interpret=pallas_triton.interpreting(),
    )
    return dense, positions, kept, mass


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
    v_pool, page_table, rows, positions, lengths, counts, scores, top, total, into, *,
    config, interpret,
):  # fmt: skip
    batch, width = rows.shape
    slots, heads, capacity = positions.shape
    kv_heads, dim = v_pool.shape[1], v_pool.shape[3]

    def shapes(*lead):
        kept = jax.ShapeDtypeStruct((*lead, dim), jnp.float32)
        return kept, jax.ShapeDtypeStruct(lead, jnp.float32)

    def call(kernel, name, args, *, last, **options):
        """The last kernel is the one that leaves its results in the slots."""
        pieces = shapes(batch, width, heads, config.splits)
        aliases = None
        if last and into is not None:
            aliases = {len(args) + 1: 0, len(args) + 2: 1}
            args = (*args, *into)
        return pallas_triton.call(
            kernel,
            out_shape=shapes(slots, heads) if last else pieces,
            aliases=aliases,
            interpret=interpret,
            name=name,
            **options,
        )(*args)

    kept, mass = call(
        functools.partial(weigh_kernel, config=config),
        "weigh_kept",
        (v_pool, page_table, rows, positions, lengths, counts, scores, top, total),
        last=config.splits == 1,
        grid=(width * (heads // kv_heads), config.splits, batch * kv_heads),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if config.splits > 1:
        kept, mass = call(
            functools.partial(sum_kernel, config=config, capacity=capacity),
            "weigh_kept_sum",
            (kept, mass, rows, lengths, counts),
            last=True,
            grid=(heads, width, batch),
            num_warps=1,
        )
    return kept, mass
