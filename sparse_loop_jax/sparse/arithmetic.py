"""The arithmetic of cross-loop sparse decode attention, for one row and one head.

The method is FlashLoop's (Yang and Liu, 2026, arXiv 2609.29812,
https://github.com/Superone77/FlashLoop). These are its formulas and nothing else: the ops in
`sparse_loop_jax.kernels` compute the same over pages and batches, and are tested against
this module.

A loop that captures attends to all N keys and keeps the k most probable ones, S:

    p = softmax(scores)    O_ref = p V    m = sum_S p_j    C_ref = sum_S p_j V_j

A later loop attends to S alone, with its own scores and values, and corrects O_ref:

    O = O_ref - C_ref + m * softmax_S(scores') V'_S

By hand: probabilities .5, .3, .2 over values 10, 20, 40, of which half are kept.

>>> import jax.numpy as jnp
>>> scores, values = jnp.log(jnp.array([5.0, 3.0, 2.0])), jnp.array([[10.0], [20.0], [40.0]])
>>> k = retained_count(0.5, 3)
>>> ref = capture(scores, values, k)
>>> k, ref.positions.tolist()
(2, [0, 1])
>>> [round(float(x), 4) for x in (ref.o_ref[0], ref.mass, ref.c_ref[0])]
[19.0, 0.8, 11.0]

The next loop gives the kept keys weights .25 and .75 over values 12 and 24, a mean of 21:

>>> scores, values = jnp.log(jnp.array([1.0, 3.0, 4.0])), jnp.array([[12.0], [24.0], [40.0]])
>>> round(float(consume(scores[:2], values[:2], ref)[0]), 4)  # 19 - 11 + .8 * 21
24.8

Dense attention would have seen the third key too; the correction keeps its stale part:

>>> round(float(capture(scores, values, k).o_ref[0]), 4)
30.5
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class RowReference(NamedTuple):
    """What a capture keeps of one row and head."""

    positions: jax.Array  # int32 [k], ascending: S
    mass: jax.Array  # float32 []: m
    o_ref: jax.Array  # float32 [head_dim]
    c_ref: jax.Array  # float32 [head_dim]


def capture(scores: jax.Array, values: jax.Array, k: int) -> RowReference:
    """Dense attention of one row, and the k keys with the largest scores.

    Args:
      scores: float32 `[N]`, scaled; a probability would underflow to ties.
      values: `[N, head_dim]`.
      k: keys to keep, 1 to N. Equal scores go to the lower position.
    """
    p = jax.nn.softmax(scores)
    order = jnp.argsort(-scores, stable=True)
    positions = jnp.sort(order[:k]).astype(jnp.int32)
    kept = p[positions]
    return RowReference(positions, kept.sum(), p @ values, kept @ values[positions])


def consume(
    scores: jax.Array,
    values: jax.Array,
    reference: RowReference,
    *,
    scaling: str = "cached",
    target_mass: jax.Array | None = None,
) -> jax.Array:
    """The corrected output of a later loop, float32 `[head_dim]`.

    Args:
      scores: float32 `[k]`, this loop's scaled scores of the kept keys.
      values: `[k, head_dim]`, this loop's values of the kept keys.
      scaling: what weighs the two means over the kept keys, the old one (`C_ref / m`) and
        the new one: "cached", the method, m for both; "none", 1 for both; "oracle", m for
        the old and `target_mass` for the new.
      target_mass: for "oracle", the kept keys' probability under this loop's dense softmax.
    """
    mean = jax.nn.softmax(scores) @ values
    if scaling == "cached":
        return reference.o_ref - reference.c_ref + reference.mass * mean
    if scaling == "none":
        return reference.o_ref - reference.c_ref / reference.mass + mean
    if scaling == "oracle" and target_mass is not None:
        return reference.o_ref - reference.c_ref + target_mass * mean
    raise ValueError(
        f"scaling must be 'cached', 'none' or 'oracle' with a target_mass, got {scaling!r}"
    )


def retained_count(retention: float, tokens: int) -> int:
    """k = min(N, max(1, ceil(N * r))), in float64 as Python's own `math.ceil` has it.

    The product is the rounded one: r = 0.07 keeps 8 of 100 keys, because 0.07 * 100 is
    7.000000000000001. float32 would differ at other N, so k is never computed on a device.

    >>> [retained_count(0.1, n) for n in (0, 1, 10, 13)], retained_count(0.07, 100)
    ([0, 1, 1, 2], 8)
    """
    return min(tokens, max(1, math.ceil(tokens * retention)))


def retained_counts(retention: float, max_tokens: int) -> np.ndarray:
    """`retained_count` of every N: int32 `[max_tokens + 1]`, indexed by N.

    An input of the compiled step, so that retentions share a program.
    """
    tokens = np.arange(max_tokens + 1, dtype=np.float64)
    counts = np.minimum(tokens, np.maximum(1.0, np.ceil(tokens * retention)))
    return counts.astype(np.int32)
