"""Sums over the keys of one row that do not depend on the other rows.

On the CPU, XLA hands large reductions to another code path than small ones, with another
`exp` and another order of summation, so that a row would round differently in a batch than
alone. What is written here as batched products and as an argmax keeps to one path: every
(row, head) is a product of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_products(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """An einsum summed in float32 whose leading axes are batch axes of both sides."""
    return jnp.einsum(
        subscripts,
        left,
        right,
        precision=jax.lax.Precision.HIGHEST,  # float32 inputs must not become TF32
        preferred_element_type=jnp.float32,
    )


def row_max(x: jax.Array) -> jax.Array:
    """`max(x, axis=-1, keepdims=True)` of numbers without NaN."""
    return jnp.take_along_axis(x, jnp.argmax(x, axis=-1, keepdims=True), axis=-1)


def row_sum(x: jax.Array) -> jax.Array:
    """`sum(x, axis=-1)` of float32 `[B, n, heads, keys]`."""
    # Two columns: a product with one is rewritten into the reduction to be avoided.
    ones = jnp.ones((*x.shape, 2), jnp.float32)
    return row_products("bnhc,bnhcx->bnhx", x, ones)[..., 0]
