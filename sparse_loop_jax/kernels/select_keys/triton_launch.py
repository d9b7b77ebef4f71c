"""Exact top-k positions as one Triton kernel launch: a program per row."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import triton_call, tuning
from sparse_loop_jax.kernels.select_keys.layout import GROUP, SelectConfig, choose_config
from sparse_loop_jax.kernels.select_keys.op import select_keys
from sparse_loop_jax.kernels.select_keys.xla import validate


@select_keys.register("triton")
def select_keys_triton(
    scores: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    *,
    capacity: int,
    index_dtype=jnp.uint16,
    config: SelectConfig | None = None,
) -> jax.Array:
    """`select_keys` in one launch through jax-triton, as the Pallas kernel does it.

    Args: as the reference, and
      config: how a row is laid out; None: the one measured for the Pallas kernel at these
        shapes, else that of `choose_config`.

    Raises:
      NotImplementedError: there is no GPU or no jax-triton.
    """
    validate(scores, lengths, counts, capacity, index_dtype)
    triton_call.require()
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
) -> jax.Array:
    """`select_keys_triton` where neighbouring rows may share a length and a count.

    Args: as there, unchecked, but lengths and counts of a shape that begins as that of the
      rows; each serves all rows of the axes that it lacks.
    """
    from sparse_loop_jax.kernels.select_keys.triton_kernel import select_kernel

    lead, span = scores.shape[:-1], scores.shape[-1]
    rows = math.prod(lead)
    if scores.size == 0:
        return jnp.zeros((*lead, capacity), index_dtype)
    if config is None:
        make = functools.partial(choose_config, span)
        config = tuning.tuned("select_keys", make, rows=rows, length=span)
    out = triton_call.call(
        select_kernel,
        scores.reshape(rows, span),
        lengths.reshape(-1).astype(jnp.int32),
        counts.reshape(-1).astype(jnp.int32),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, capacity), index_dtype),
        num_warps=config.num_warps,
        name="select_keys",
        SPAN=span,
        UNIT=math.gcd(span, GROUP),
        CAPACITY=capacity,
        SHARE=rows // lengths.size,
        WARPS=config.num_warps,
        GROUPS=config.groups,
    )
    return out.reshape(*lead, capacity)
