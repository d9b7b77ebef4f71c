"""A warpgroup of the kernel that attends: 64 rows of a tile, block after block of keys.

Blocks are taken from the last to the first. The last ones, of which rows see different parts,
are masked. Those that every row sees follow in a pipeline: while the matrix units multiply the
weights of one block by its values, the softmax of the next one is computed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from sparse_loop_jax.kernels.pallas_mosaic import accumulator, load
from sparse_loop_jax.kernels.prefill_attention.mosaic_kernel import (
    GROUPS,
    KEYS,
    ROWS,
    Inputs,
    Shared,
    Tile,
    slot_of,
)

# How the threads of a warpgroup hold a matrix, and what belongs to its rows or its columns.
MATRIX = gpu.Layout.WGMMA
OF_ROW, OF_KEY = MATRIX.reduce(1), MATRIX.reduce(0)
LOG2E = math.log2(math.e)  # exp2 is the hardware's exponential
# The peak of a row that has seen no score above it. Minus infinity less this is minus infinity;
# less minus infinity, it would be NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)


class _Sums(NamedTuple):
    """What the rows have gathered; weights are relative to `peak`.

    The values of the last block are not in `acc` yet: its weights are.
    """

    peak: jax.Array  # float32 [ROWS]: the largest base-2 score
    total: jax.Array  # float32 [ROWS]: the sum of the weights
    acc: jax.Array  # float32 [ROWS, dim]: the values, by weight
    weights: jax.Array  # [ROWS, KEYS] in the dtype of V: of the last block


class _Group(NamedTuple):
    """A warpgroup at a tile."""

    shared: Shared
    tile: Tile
    q: Any  # in shared memory [ROWS, dim]
    limits: jax.Array  # int32 [ROWS]: keys that each row sees
    group: jax.Array
    masked: jax.Array  # blocks, from the last on, that are masked
    interpret: bool

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 * LOG2E

    def await_keys(self, step) -> None:
        """Waits for the keys of a block, if there is one."""

        @pl.when(step < self.tile.steps)
        def _():
            gpu.barrier_wait(self.shared.k_full.at[slot_of(step)])

    def await_values(self, step) -> None:
        """Waits for the values of a block, which for a masked one has been done."""

        @pl.when(step >= self.masked)
        def _():
            gpu.barrier_wait(self.shared.v_full.at[slot_of(step)])


def attend_tile(inputs: Inputs, shared: Shared, group, tile: Tile, *, interpret: bool) -> None:
    """Attention of this warpgroup's rows of a tile, from shared memory to `inputs.out`."""
    rows = pl.ds(tile.row + group * ROWS, ROWS)
    limits = load(inputs.limits.at[tile.request, rows], OF_ROW)
    gpu.barrier_wait(shared.q_full)
    q = shared.q.at[group]
    # At least one block is masked, whether it needs to be or not: the pipeline begins with it.
    masked = tile.steps - jnp.minimum(tile.shared, jnp.maximum(tile.steps - 1, 0))
    here = _Group(shared, tile, q, limits, group, masked, interpret)
    sums = _Sums(
        peak=gpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), OF_ROW),
        total=gpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), OF_ROW),
        acc=gpu.layout_cast(jnp.zeros(q.shape, jnp.float32), MATRIX),
        weights=gpu.layout_cast(jnp.zeros((ROWS, KEYS), q.dtype), MATRIX),
    )
    here.await_keys(0)
    sums = lax.fori_loop(0, masked, functools.partial(_masked_block, here), sums)
    sums = lax.fori_loop(masked, tile.steps, functools.partial(_pipelined_block, here), sums)

    def last(_, sums):
        here.await_values(tile.steps - 1)
        return sums._replace(acc=_add_values(here, tile.steps - 1, sums))

    sums = lax.fori_loop(0, jnp.minimum(tile.steps, 1), last, sums)
    _store(inputs, here, rows, sums)


def _spread(x: jax.Array, shape, axis: int = 0) -> jax.Array:
    """A value of each row (axis 0) or key (axis 1), over the matrix."""
    return lax.broadcast_in_dim(x, shape, [axis])


def _scores(here: _Group, step) -> jax.Array:
    """q k of a block whose keys are there: float32 [ROWS, KEYS]."""
    slot = slot_of(step)

    def product(ref):
        gpu.wgmma(ref, here.q, here.shared.k.at[slot].transpose((1, 0)))
        return ref[...]

    scores = pl.run_scoped(product, accumulator(ROWS, KEYS))
    gpu.barrier_arrive(here.shared.k_free.at[slot])
    return scores


def _add_values(here: _Group, step, sums: _Sums) -> jax.Array:
    """`acc` with the values of the last block, `step`, which are there."""
    slot = slot_of(step)
    values = here.shared.v.at[slot]

    def product(ref):
        ref[...] = sums.acc
        gpu.wgmma(ref, sums.weights, values)
        return ref[...]

    if here.interpret:
        acc = sums.acc + _dot(sums.weights, values)
    else:
        acc = pl.run_scoped(product, accumulator(*sums.acc.shape))
    gpu.barrier_arrive(here.shared.v_free.at[slot])
    return acc


def _dot(weights: jax.Array, values) -> jax.Array:
    """The interpreter has no product of registers with shared memory."""
    product = jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
    gpu.commit_smem()  # a copy follows what threads, not the matrix units, have read
    return product


def _weigh(here: _Group, scores: jax.Array, sums: _Sums):
    """Peak and total with a block of scores; the factor of what was before; weights."""
    peak = jnp.maximum(sums.peak, scores.max(axis=1) * here.scale)
    keep = jnp.exp2(sums.peak - peak)
    weights = jnp.exp2(scores * here.scale - _spread(peak, scores.shape))
    return peak, sums.total * keep + weights.sum(axis=1), keep, weights


# Blocks that all rows see -----------------------------------------------------------------


def _pipelined_block(here: _Group, step, sums: _Sums) -> _Sums:
    """Scores and weights of one block, and the values of the one before."""
    slot, before = slot_of(step), slot_of(step - 1)
    keys, values = here.shared.k.at[slot], here.shared.v.at[before]

    def start(scores_ref):
        gpu.wgmma(scores_ref, here.q, keys.transpose((1, 0)))
        here.await_values(step - 1)

    def soften(scores):
        gpu.barrier_arrive(here.shared.k_free.at[slot])
        out = _weigh(here, scores, sums)
        # In front of the wait for the other product, a wait that ends in a branch: the
        # compiler would move one that does not ahead of the softmax.
        here.await_keys(step + 1)
        return out

    def interpreted(scores_ref):
        start(scores_ref)
        acc = sums.acc + _dot(sums.weights, values)
        return *soften(scores_ref[...]), acc

    def compiled(scores_ref, acc_ref):
        acc_ref[...] = sums.acc
        start(scores_ref)
        gpu.wgmma(acc_ref, sums.weights, values)
        out = soften(gpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        return *out, gpu.wgmma_accumulator_load(acc_ref, wait_n=0)

    refs = accumulator(ROWS, KEYS), accumulator(*sums.acc.shape)
    if here.interpret:
        peak, total, keep, weights, acc = pl.run_scoped(interpreted, refs[0])
    else:
        peak, total, keep, weights, acc = pl.run_scoped(compiled, *refs)
        # Not rounded before: the registers of the old ones are in use until here, and a
        # compiler that must wait for them would wait at every product.
        acc, weights = lax.optimization_barrier((acc, weights))
    gpu.barrier_arrive(here.shared.v_free.at[before])
    return _Sums(peak, total, acc * _spread(keep, acc.shape), weights.astype(here.q.dtype))


# Blocks of which rows see different parts -------------------------------------------------


def _masked_block(here: _Group, step, sums: _Sums) -> _Sums:
    """As `_pipelined_block`, one thing after the other."""
    scores = _scores(here, step)
    first = (here.tile.steps - 1 - step) * KEYS
    position = first + gpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX)
    seen = position < _spread(here.limits, scores.shape)
    peak, total, keep, weights = _weigh(here, jnp.where(seen, scores, -jnp.inf), sums)

    def add(_, acc):
        return _add_values(here, step - 1, sums._replace(acc=acc))

    acc = lax.fori_loop(0, jnp.minimum(step, 1), add, sums.acc)
    acc = acc * _spread(keep, acc.shape)
    spoiled = _clean_values(here, step, seen)
    acc = jnp.where(_spread(spoiled, acc.shape) > 0, jnp.nan, acc)
    here.await_keys(step + 1)
    return _Sums(peak, total, acc, weights.astype(here.q.dtype))


def _clean_values(here: _Group, step, seen: jax.Array) -> jax.Array:
    """Makes zeros of a block's values that are not finite: zero times NaN is NaN.

    Each of the two warpgroups cleans its half of the keys. Returns float32 [ROWS]: 1 for rows
    that see one of them.
    """
    shared, slot = here.shared, slot_of(step)
    turn = lax.rem(step, jnp.int32(2))  # the other may still read the last
    gpu.barrier_wait(shared.v_full.at[slot])

    def clean(half: int):
        keys = pl.ds(half * (KEYS // GROUPS), KEYS // GROUPS)
        part = shared.v.at[slot, keys]
        values = load(part, MATRIX)
        gpu.commit_smem()  # read by all threads before any of them writes
        finite = jnp.abs(values.astype(jnp.float32)) < jnp.inf
        part[...] = jnp.where(finite, values, jnp.zeros_like(values))
        bad = jnp.where(finite, jnp.float32(0), jnp.float32(1))
        shared.bad[turn, keys] = bad.max(axis=1)

    for half in range(GROUPS):
        pl.when(here.group == half)(functools.partial(clean, half))
    gpu.commit_smem()
    gpu.barrier_arrive(shared.clean)
    gpu.barrier_wait(shared.clean)
    bad = load(shared.bad.at[turn], OF_KEY)
    return jnp.where(seen, _spread(bad, seen.shape, axis=1), jnp.float32(0)).max(axis=1)


def _store(inputs: Inputs, here: _Group, rows, sums: _Sums) -> None:
    """Writes the output, by way of the place of the queries."""
    total = jnp.where(here.limits > 0, sums.total, jnp.float32(1))
    out = sums.acc * _spread(1 / total, sums.acc.shape)
    out = jnp.where(_spread(here.limits, out.shape) > 0, out, jnp.float32(0))
    gpu.commit_smem()  # read by all threads' products before any of them writes
    here.q[...] = out.astype(here.q.dtype)
    gpu.commit_smem()
    tile = here.tile
    gpu.copy_smem_to_gmem(here.q, inputs.out.at[tile.request, rows, tile.head])
    gpu.wait_smem_to_gmem(0)
