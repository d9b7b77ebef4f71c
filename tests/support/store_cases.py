"""A small reference store and what is captured into it, for the tests of the store."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse import store as rs

MODEL = OuroConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
)
SLOTS, CAPACITY, BATCH, ROWS = 8, 5, 2, 3


def payload(value: int, shape=(BATCH, ROWS)):
    """counts, positions, mass, base of rows, each recognisable by `value` and its place."""
    row = np.arange(np.prod(shape)).reshape(shape)
    heads, dim = MODEL.num_attention_heads, MODEL.head_dim
    return (
        jnp.full(shape, 1 + value % CAPACITY, jnp.int32),
        jnp.asarray(np.broadcast_to(row[..., None, None], (*shape, heads, CAPACITY)))
        .astype(jnp.uint16) + jnp.uint16(100 * value),
        jnp.full((*shape, heads), value / 64, jnp.float32),
        jnp.full((*shape, heads, dim), value, jnp.float32),
    )  # fmt: skip


def held_store():
    """A store, a lease of its first rows and the plan of all of them."""
    store = rs.create(MODEL, slots=SLOTS, capacity=CAPACITY)
    store, lease = rs.reserve(store, jnp.int32([2, 2]), ROWS)
    rows, refused = rs.plan(store, lease, lease.slots < SLOTS)
    assert not refused.any()
    return store, lease, rows
