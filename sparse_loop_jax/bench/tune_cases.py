"""What `sparse-loop bench tune` measures: an op, a workload, a grid of configurations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench.chain import Chain, sets_for
from sparse_loop_jax.kernels import tuning
from sparse_loop_jax.kernels.paged_attention import pallas as paged
from sparse_loop_jax.kernels.select_keys import pallas as select
from sparse_loop_jax.kernels.sparse_attention import pallas as sparse
from sparse_loop_jax.kernels.workloads import (
    AttentionWorkload,
    paged_inputs,
    spread_positions,
)

VERIFIED_ROWS = 4  # a cut of paged attention serves decoding and verification
RETENTION = 0.1
GENERATED = 13  # tokens past a workload's context


@dataclasses.dataclass(frozen=True)
class Case:
    """One entry to be measured.

    Attributes:
      op, key: what it is for; the key is bucketed.
      computed: what the op would do by itself.
      grid: other configurations.
      chains: number of rows -> configuration -> calls to time. The first decides who is a
        finalist, all of them together decide.
    """

    op: str
    workload: str
    key: tuning.Key
    computed: Any
    grid: list[Any]
    chains: dict[int, Callable[[Any], Chain]]


def cases(workloads: list[AttentionWorkload]) -> Iterator[Callable[[], Case]]:
    """What is worth measuring for workloads, the most wanted first."""
    wide = functools.partial(select_case, width=2)
    reported = [w for w in workloads if "bench" in w.tags]
    others = [w for w in workloads if w not in reported]
    for part in (reported, others):
        for make in (paged_case, sparse_case, wide, verification_case, select_case):
            for workload in part:
                yield functools.partial(make, workload)


def verification_case(workload: AttentionWorkload) -> Case:
    """`sparse_case` for the rows of a verification."""
    return sparse_case(dataclasses.replace(workload, rows=VERIFIED_ROWS))


def paged_case(workload: AttentionWorkload) -> Case:
    """Dense attention: one row of each request, and a verification with the same cut.

    A decode step at a context attends to what has been generated since, too: whole blocks
    and tables that just suffice would be those of a context that is never met.
    """
    w = dataclasses.replace(workload, rows=1, context=workload.context + GENERATED)
    inputs = paged_inputs(w, sets=sets_for(w.dense_bytes))
    width = 1 << (w.pages - 1).bit_length()
    missing = ((0, 0), (0, width - w.pages))
    tables = [
        jnp.pad(table, missing, constant_values=inputs.k_pool.shape[0])
        for table in inputs.tables
    ]
    span = width * w.page_size
    pool = inputs.k_pool.shape

    def chain(rows: int, config) -> Chain:
        shape = (w.batch, rows, w.heads, w.head_dim)
        block_rows = paged.choose_config(shape, pool, width, w.dtype).block_rows
        config = dataclasses.replace(config, block_rows=block_rows)
        last = jnp.arange(1 - rows, 1, dtype=jnp.int32)
        lengths = jnp.broadcast_to(w.context + last, (w.batch, rows))

        def step(q, shared, table):
            k, v, lengths = shared
            return paged.paged_attention_pallas(q, k, v, table, lengths, config=config)

        q = jnp.broadcast_to(inputs.q, shape)
        shared = inputs.k_pool, inputs.v_pool, lengths
        return Chain(step, q, shared, tables, w.dense_bytes)

    shape = (w.batch, 1, w.heads, w.head_dim)
    computed = paged.choose_config(shape, pool, width, w.dtype)
    splits = _around(computed.splits, 0.5, 1, 2, most=max(span // 64, 1))
    tiles = [(64, 2, 3), (64, 4, 3), (64, 2, 4), (128, 4, 2), (32, 1, 3)]
    # Other cuts with the usual tiles, the computed one with all.
    grid = [
        dataclasses.replace(
            computed,
            splits=s,
            block_keys=keys,
            min_keys=128 if span >= 128 * s else 64,
            num_warps=warps,
            num_stages=stages,
        )
        for s, (i, (keys, warps, stages)) in itertools.product(splits, enumerate(tiles))
        if i < 2 or s == computed.splits
    ]
    key = tuning.bucketed(
        "paged_attention",
        batch=w.batch,
        kv_heads=w.kv_heads,
        group=w.heads // w.kv_heads,
        head_dim=w.head_dim,
        length=span,
        dtype=w.dtype,
    )
    rows = [n for n in (1, VERIFIED_ROWS) if n * w.heads // w.kv_heads <= paged.FEW_QUERIES]
    chains = {n: functools.partial(chain, n) for n in rows}
    return Case("paged_attention", workload.name, key, computed, grid, chains)


def sparse_case(workload: AttentionWorkload) -> Case:
    """Consume of a tenth of the keys, by number of rows."""
    w = dataclasses.replace(workload, retention=RETENTION)
    inputs = paged_inputs(w, sets=sets_for(w.kept_bytes // w.rows))
    counts = jnp.full((w.batch, w.rows), w.kept, jnp.int32)
    mass = jnp.full((w.batch, w.rows, w.heads), 0.3, jnp.float32)
    base = jnp.full(inputs.q.shape, 0.01, jnp.float32)
    positions = [spread_positions(w, seed=i) for i in range(len(inputs.tables))]

    def chain(config) -> Chain:
        def step(q, shared, item):
            k, v, counts, mass, base = shared
            table, positions = item
            args = (q, k, v, table, positions, counts, mass, base)
            return sparse.sparse_attention_pallas(*args, config=config)

        shared = inputs.k_pool, inputs.v_pool, counts, mass, base
        items = list(zip(inputs.tables, positions, strict=True))
        return Chain(step, inputs.q, shared, items, w.kept_bytes)

    computed = sparse.choose_config(w.batch * w.rows * w.heads, w.capacity)
    # Larger blocks want fewer pieces.
    most = max(w.capacity // 16, 1)
    tiles = [
        ((32, 1, 3), (0.5, 1, 2)),
        ((32, 1, 4), (1,)),
        ((64, 2, 3), (0.25, 0.5, 1)),
    ]
    grid = [
        dataclasses.replace(
            computed, splits=s, block_keys=keys, num_warps=warps, num_stages=stages
        )
        for (keys, warps, stages), factors in tiles
        for s in _around(computed.splits, *factors, most=most)
    ]
    key = tuning.bucketed(
        "sparse_attention",
        batch=w.batch,
        rows=w.rows,
        heads=w.heads,
        head_dim=w.head_dim,
        length=w.capacity,
        dtype=w.dtype,
    )
    return Case("sparse_attention", w.name, key, computed, grid, {w.rows: chain})


def select_case(workload: AttentionWorkload, width: int = 1) -> Case:
    """Selection of a tenth of the scores of one row of each request.

    Args:
      width: of the scores, in contexts; a page table is wider than the context in it.
    """
    w = dataclasses.replace(workload, rows=1, retention=RETENTION)
    span = width * w.span
    shape = (w.batch * w.heads, span)
    sets = sets_for(w.scores_bytes)
    scores = [jax.random.normal(jax.random.key(i), shape) for i in range(sets)]
    lengths = jnp.full(shape[:1], w.context, jnp.int32)
    index = jnp.uint16 if span <= 1 << 16 else jnp.uint32

    def chain(config) -> Chain:
        def step(counts, lengths, scores):
            out = select.select_keys_pallas(
                scores, lengths, counts, capacity=w.capacity, index_dtype=index, config=config
            )
            return jnp.minimum(counts, counts + out[:, 0].astype(jnp.int32))

        counts = jnp.full(shape[:1], w.kept, jnp.int32)
        return Chain(step, counts, lengths, scores, w.scores_bytes)

    computed = select.choose_config(span)
    warps = _around(computed.num_warps, 0.25, 0.5, 1, 2, most=32)
    grid = [select.choose_config(span, num_warps=n) for n in warps]
    key = tuning.bucketed("select_keys", rows=shape[0], length=span)
    name = f"{w.name} in {span}"
    return Case("select_keys", name, key, computed, grid, {1: chain})


def _around(value: int, *factors: float, most: int) -> list[int]:
    """Multiples of a value between 1 and `most`, without repetition."""
    return sorted({min(max(int(value * factor), 1), most) for factor in factors})
