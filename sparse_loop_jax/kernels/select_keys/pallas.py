"""Exact top-k positions as one Pallas kernel launch: a program per row."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import pallas_triton, tuning
from sparse_loop_jax.kernels.select_keys.layout import SelectConfig, choose_config
from sparse_loop_jax.kernels.select_keys.op import select_keys
from sparse_loop_jax.kernels.select_keys.pallas_kernel import select_kernel
from sparse_loop_jax.kernels.select_keys.xla import validate


@select_keys.register("pallas")
def select_keys_pallas(
    scores: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    *,
    capacity: int,
    index_dtype=jnp.uint16,
    config: SelectConfig | None = None,
) -> jax.Array:
    """`select_keys` in one launch; the scores of a row are read once up to 32,768 of them.

    Longer rows read what lies beyond once more for each step of their search.

    Args: as the reference, and
      config: how a row is laid out; None: the one measured for these shapes, else
        that of `choose_config`.
    """
    validate(scores, lengths, counts, capacity, index_dtype)
    return select_rows(
        scores, lengths, counts, capacity=capacity, index_dtype=index_dtype, config=config
    )


def select_rows(
    scores: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    *,
    capacity: int,
    index_dtype,
    config: SelectConfig | None = None,
    into: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """`select_keys_pallas` where neighbouring rows may share a length and a count.

    Args: as there, unchecked, but lengths and counts of a shape that begins as that of the
      rows; each serves all rows of the axes that it lacks. And
      into: slots int32, of the shape of the lengths, and the array `[slots, ..., capacity]`
        that is to be updated: rows of a slot past the end go nowhere. The dots are the axes
        that the lengths lack.
    """
    lead, span = scores.shape[:-1], scores.shape[-1]
    if scores.size == 0:
        return jnp.zeros((*lead, capacity), index_dtype) if into is None else into[1]
    if config is None:
        make = functools.partial(choose_config, span)
        config = tuning.tuned("select_keys", make, rows=math.prod(lead), length=span)
    if into is not None:
        slots, array = into
        into = slots.reshape(-1).astype(jnp.int32), array.reshape(-1, capacity)
        lead = array.shape[:-1]
    out = _run(
        scores.reshape(-1, span),
        lengths.reshape(-1).astype(jnp.int32),
        counts.reshape(-1).astype(jnp.int32),
        into,
        capacity=capacity,
        index_dtype=jnp.dtype(index_dtype),
        config=config,
        interpret=pallas_triton.interpreting(),
    )
    return out.reshape(*lead, capacity)


@functools.partial(jax.jit, static_argnames=("capacity", "index_dtype", "config", "interpret"))
def _run(scores, lengths, counts, into, *, capacity, index_dtype, config, interpret):
    rows = scores.shape[0] if into is None else into[1].shape[0]
    return pallas_triton.call(
        functools.partial(select_kernel, config=config, interpret=interpret),
        grid=(scores.shape[0],),
        out_shape=jax.ShapeDtypeStruct((rows, capacity), index_dtype),
        num_warps=config.num_warps,
        aliases=None if into is None else {4: 0},
        interpret=interpret,
        name="select_keys",
    )(scores, lengths, counts, *(into or ()))
