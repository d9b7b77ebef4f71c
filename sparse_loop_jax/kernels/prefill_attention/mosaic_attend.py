"""A warpgroup of the kernel that attends: 64 rows of a tile, block after block of keys.

Blocks that every row sees are taken in a pipeline: while the matrix units multiply weights by
the values of one block, the softmax of the next one is computed. The last blocks, of which
rows see different parts, are masked, one after the other.
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


class _Sums(NamedTuple):
    """What the rows have gathered; weights are relative to `peak`."""

    peak: jax.Array  # float32 [ROWS]: the largest base-2 score
    total: jax.Array  # float32 [ROWS]: the sum of the weights
    acc: jax.Array  # float32 [ROWS, dim]: the values, by weight


class _Group(NamedTuple):
    """A warpgroup at a tile."""

    shared: Shared
    tile: Tile
    q: Any  # in shared memory [ROWS, dim]
    limits: jax.Array  # int32 [ROWS]: keys that each row sees
    group: jax.Array
    interpret: bool

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 * LOG2E

    def slot(self, step) -> jax.Array:
        return slot_of(self.tile.before + step)

    def take_turn(self) -> None:
        gpu.barrier_wait(self.shared.turn.at[self.group])

    def hand_over(self) -> None:
        gpu.barrier_arrive(self.shared.turn.at[1 - self.group])

    def await_keys(self, step) -> None:
        """Waits for the keys of a block, if there is one."""

        @pl.when(step < self.tile.steps)
        def _():
            gpu.barrier_wait(self.shared.k_full.at[self.slot(step)])


def attend_tile(inputs: Inputs, shared: Shared, group, tile: Tile, *, interpret: bool) -> None:
    """Attention of this warpgroup's rows of a tile, from shared memory to `inputs.out`."""
    rows = pl.ds(tile.row + group * ROWS, ROWS)
    limits = load(inputs.limits.at[tile.request, rows], OF_ROW)
    gpu.barrier_wait(shared.q_full.at[tile.place])
    q = shared.q.at[tile.place, group]
    here = _Group(shared, tile, q, limits, group, interpret)
    sums = _Sums(
        peak=gpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), OF_ROW),
        total=gpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), OF_ROW),
        acc=gpu.layout_cast(jnp.zeros(q.shape, jnp.float32), MATRIX),
    )
    here.await_keys(0)
    sums = _shared_blocks(here, sums)
    masked = functools.partial(_masked_block, here)
    sums = lax.fori_loop(tile.shared, tile.steps, masked, sums)
    _store(inputs, here, rows, sums)


def _spread(x: jax.Array, shape, axis: int = 0) -> jax.Array:
    """A value of each row (axis 0) or key (axis 1), over the matrix."""
    return lax.broadcast_in_dim(x, shape, [axis])


# Blocks that all rows see -----------------------------------------------------------------


def _shared_blocks(here: _Group, sums: _Sums) -> _Sums:
    """The first `tile.shared` blocks. A block's values are added one step late.

    The two warpgroups take turns at starting their products, so that one has its softmax
    while the other one's products run.
    """
    shared = here.tile.shared
    some = jnp.minimum(shared, 1)
    weights = gpu.layout_cast(jnp.zeros((ROWS, KEYS), here.q.dtype), MATRIX)

    def first(_, carry):
        sums, _ = carry
        here.take_turn()
        scores = _scores(here, 0, here.hand_over)
        sums, _, weights = _weigh(here, scores, sums)
        here.await_keys(1)
        return sums, weights.astype(here.q.dtype)

    def next_one(step, carry):
        return _pipelined_block(here, step, *carry)

    def last(_, carry):
        sums, weights = carry
        gpu.barrier_wait(here.shared.v_full.at[here.slot(shared - 1)])
        return sums._replace(acc=_add_values(here, shared - 1, weights, sums.acc)), weights

    pl.when(here.group == 1)(here.hand_over)  # the first turn is group 0's
    carry = lax.fori_loop(0, some, first, (sums, weights))
    carry = lax.fori_loop(1, shared, next_one, carry)
    pl.when(here.group == 0)(here.take_turn)  # its last one, not needed
    return lax.fori_loop(0, some, last, carry)[0]


def _pipelined_block(here: _Group, step, sums: _Sums, weights: jax.Array):
    """Scores and weights of one block, and the values of the one before.

    Args:
      weights: of the block before, in the dtype of V.

    Returns:
      The sums, all relative to the new peak, and this block's weights.
    """
    slot, before = here.slot(step), here.slot(step - 1)
    keys, values = here.shared.k.at[slot], here.shared.v.at[before]
    here.take_turn()

    def start(scores_ref):
        gpu.wgmma(scores_ref, here.q, keys.transpose((1, 0)))
        gpu.barrier_wait(here.shared.v_full.at[before])

    def soften(scores):
        gpu.barrier_arrive(here.shared.k_free.at[slot])
        out = _weigh(here, scores, sums)
        # In front of the wait for the other product, a wait that ends in a branch: the
        # compiler would move one that does not ahead of the softmax.
        here.await_keys(step + 1)
        return out

    def interpreted(scores_ref):
        start(scores_ref)
        here.hand_over()
        acc = sums.acc + _dot(weights, values)
        return *soften(scores_ref[...]), acc

    def compiled(scores_ref, acc_ref):
        acc_ref[...] = sums.acc
        start(scores_ref)
        gpu.wgmma(acc_ref, weights, values)
        here.hand_over()
        out = soften(gpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        return *out, gpu.wgmma_accumulator_load(acc_ref, wait_n=0)

    scores_ref = accumulator(ROWS, KEYS)
    acc_ref = accumulator(*sums.acc.shape)
    if here.interpret:
        new, keep, weights, acc = pl.run_scoped(interpreted, scores_ref)
    else:
        new, keep, weights, acc = pl.run_scoped(compiled, scores_ref, acc_ref)
        # Not rounded before: the registers of the old ones are in use until here, and a
        # compiler that must wait for them would wait at every product.
        acc, weights = lax.optimization_barrier((acc, weights))
    gpu.barrier_arrive(here.shared.v_free.at[before])
    new = new._replace(acc=acc * _spread(keep, acc.shape))
    return new, weights.astype(here.q.dtype)


def _weigh(here: _Group, scores: jax.Array, sums: _Sums):
    """Peak and total with a block of scores; the factor of what was before; weights."""
    peak = jnp.maximum(sums.peak, scores.max(axis=1) * here.scale)
    keep = jnp.exp2(sums.peak - peak)
    weights = jnp.exp2(scores * here.scale - _spread(peak, scores.shape))
    total = sums.total * keep + weights.sum(axis=1)
    return sums._replace(peak=peak, total=total), keep, weights


def _scores(here: _Group, step, meanwhile=lambda: None) -> jax.Array:
    """q k of a block whose keys are there: float32 [ROWS, KEYS]."""
    slot = here.slot(step)

    def product(ref):
        gpu.wgmma(ref, here.q, here.shared.k.at[slot].transpose((1, 0)))
        meanwhile()
        return ref[...]

    scores = pl.run_scoped(product, accumulator(ROWS, KEYS))
    gpu.barrier_arrive(here.shared.k_free.at[slot])
    return scores


def _add_values(here: _Group, step, weights: jax.Array, acc: jax.Array) -> jax.Array:
    """`acc` and the values of a block that are there, by weight."""
    slot = here.slot(step)
    values = here.shared.v.at[slot]

    def product(ref):
        ref[...] = acc
        gpu.wgmma(ref, weights, values)
        return ref[...]

    if here.interpret:
        acc = acc + _dot(weights, values)
    else:
        acc = pl.run_scoped(product, accumulator(*acc.shape))
    gpu.barrier_arrive(here.shared.v_free.at[slot])
    return acc


def _dot(weights: jax.Array, values) -> jax.Array:
    """The interpreter has no product of registers with shared memory."""
    return jnp.dot(weights, values[...], preferred_element_type=jnp.float32)


# Blocks of which rows see different parts -------------------------------------------------


def _masked_block(here: _Group, step, sums: _Sums) -> _Sums:
    shared = here.shared
    scores = _scores(here, step)
    position = gpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX) + step * KEYS
    seen = position < _spread(here.limits, scores.shape)
    scores = jnp.where(seen, scores * here.scale, -jnp.inf)
    peak = jnp.maximum(sums.peak, scores.max(axis=1))
    # -inf minus -inf is nan: a row that has seen no key yet subtracts zero.
    shift = jnp.where(peak == -jnp.inf, jnp.float32(0), peak)
    keep = jnp.exp2(sums.peak - shift)
    weights = jnp.exp2(scores - _spread(shift, scores.shape))
    acc = sums.acc * _spread(keep, sums.acc.shape)
    spoiled = _clean_values(here, step, seen)
    acc = jnp.where(_spread(spoiled, acc.shape) > 0, jnp.nan, acc)
    here.await_keys(step + 1)
    return _Sums(
        peak=peak,
        total=sums.total * keep + weights.sum(axis=1),
        acc=_add_values(here, step, weights.astype(shared.v.dtype), acc),
    )


def _clean_values(here: _Group, step, seen: jax.Array) -> jax.Array:
    """Makes zeros of a block's values that are not finite: zero times NaN is NaN.

    Each of the two warpgroups cleans its half of the keys. Returns float32 [ROWS]: 1 for rows
    that see one of them.
    """
    shared, slot = here.shared, here.slot(step)
    turn = lax.rem(here.tile.before + step, jnp.int32(2))  # the other may still read the last
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
    here.q[...] = out.astype(here.q.dtype)
    gpu.commit_smem()
    tile = here.tile
    gpu.copy_smem_to_gmem(here.q, inputs.out.at[tile.request, rows, tile.head])
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    gpu.barrier_arrive(here.shared.q_free.at[tile.place])
