"""Exact top-k positions in plain JAX: the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.select_keys.op import select_keys

PADDING, NAN = 0, 1  # keys below that of -inf (0x007fffff), so no number can have them


@select_keys.register("xla")
def select_keys_xla(
    scores: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    *,
    capacity: int,
    index_dtype=jnp.uint16,
) -> jax.Array:
    """Positions of the `counts` largest of the first `lengths` scores, in ascending order.

    Args:
      scores: float32 `[..., S]`. Entries at or past a row's length are padding and may hold
        anything, NaN and infinities included.
      lengths: int32 `[...]`, at most S; 0 for a dead row.
      counts: int32 `[...]`, how many to keep, at most `min(lengths, capacity)`; what asks
        for more gets `min(lengths, capacity)`, what asks for less than none gets none.
      capacity: entries of the result, at least 1.
      index_dtype: `uint16` (S up to 65,536) or `uint32`.

    Returns:
      `[..., capacity]` of `index_dtype`: the kept positions, ascending, then zeros. Readers
      gate on the count, not on the zeros.

    The choice is exact at every size: -0 equals +0, equal scores go to the lower position,
    NaN ranks below every number (-inf too) and among themselves by position, and padding is
    never chosen.

    Raises:
      ValueError: shapes or dtypes do not fit, or positions do not fit `index_dtype`.
    """
    validate(scores, lengths, counts, capacity, index_dtype)
    span = scores.shape[-1]
    position = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    counts = jnp.clip(counts, 0, jnp.minimum(jnp.clip(lengths, 0, span), capacity))
    keys = jnp.where(position < lengths[..., None], ordered_keys(scores), jnp.uint32(PADDING))

    threshold = _count_th_largest(keys, counts)[..., None]
    above = keys > threshold
    # Of the keys that tie with the last one kept, the lowest positions fill the rest.
    room = counts - above.sum(axis=-1, dtype=jnp.int32)
    tied = keys == threshold
    tie_rank = jnp.cumsum(tied, axis=-1, dtype=jnp.int32)
    kept = above | (tied & (tie_rank <= room[..., None]))

    # The rank among the kept is the place in the result; the rest lands past the end.
    place = jnp.where(kept, jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, capacity)
    place = place.reshape(-1, span)
    rows = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
    out = jnp.zeros((place.shape[0], capacity), index_dtype)
    out = out.at[rows, place].set(position.reshape(-1, span).astype(index_dtype), mode="drop")
    return out.reshape(*scores.shape[:-1], capacity)


def ordered_keys(scores: jax.Array) -> jax.Array:
    """uint32 keys that order as the float32 scores do, NaN below every number.

    Made of the bits alone: a comparison of floats could flush denormals to zero.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    magnitude = bits & ~sign
    bits = jnp.where(magnitude == 0, jnp.uint32(0), bits)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)
    return jnp.where(magnitude > 0x7F800000, jnp.uint32(NAN), keys)


def _count_th_largest(keys: jax.Array, counts: jax.Array) -> jax.Array:
    """The largest t with at least `counts` keys >= t, one bit at a time from the top."""

    def step(index, threshold):
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(31) - index.astype(jnp.uint32)))
        reached = jnp.sum(keys >= candidate[..., None], axis=-1, dtype=jnp.int32) >= counts
        return jnp.where(reached, candidate, threshold)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(keys.shape[:-1], jnp.uint32))


def validate(scores, lengths, counts, capacity: int, index_dtype) -> None:
    """The argument checks that every implementation makes.

    Raises:
      ValueError: as in `select_keys_xla`.
    """
    if scores.dtype != jnp.float32:
        raise ValueError(f"scores must be float32, got {scores.dtype}")
    lead = scores.shape[:-1]
    for name, value in (("lengths", lengths), ("counts", counts)):
        if value.shape != lead or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers of shape {lead}, got {value.dtype} {value.shape}"
            )
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"capacity must be a positive integer, got {capacity!r}")
    if index_dtype not in (jnp.uint16, jnp.uint32):
        raise ValueError(f"index_dtype must be uint16 or uint32, got {index_dtype}")
    if scores.shape[-1] - 1 > jnp.iinfo(index_dtype).max:
        raise ValueError(
            f"positions of {scores.shape[-1]} scores do not fit uint16; use uint32"
        )
