"""The reference store under scan, vmap, donation and tree round trips."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from store_cases import CAPACITY, MODEL, ROWS, SLOTS, held_store, payload

from sparse_loop_jax.sparse import store as rs


def leaves(store):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(store)]


def assert_same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def one_round(store, value):
    """A whole round under one trace: what the model does, without its arithmetic."""
    store, lease = rs.reserve(store, jnp.int32([2, 1]), ROWS)
    rows, refused = rs.plan(store, lease, lease.slots < store.slots)
    bad = [refused.sum()]
    for layer in range(MODEL.num_hidden_layers):
        counts, positions, mass, base = payload(0)
        store, no = rs.capture(
            store, rows, layer, counts, positions, mass, base + value.astype(jnp.float32)
        )
        bad.append(no.sum())
    reference, no = rs.consume(store, rows, 1)
    store = rs.accept(store, lease, jnp.int32([1, 0]))
    store, late = rs.release(store, lease)
    return store, (reference.base[0, 0, 0, 0], jnp.stack([*bad, no.sum(), late.sum()]))


def test_rounds_scan_and_are_bounded_by_slots():
    """A store that would fill after two rounds serves a hundred."""
    store = rs.create(MODEL, slots=4, capacity=CAPACITY)
    values = jnp.arange(100)
    store, (seen, refused) = jax.jit(functools.partial(jax.lax.scan, one_round))(store, values)
    np.testing.assert_array_equal(seen, values)
    assert not refused.any()
    assert not store.held.any()
    assert store.version.tolist() == [100, 100, 100, 0]


def test_stores_vmap():
    store = rs.create(MODEL, slots=SLOTS, capacity=CAPACITY)
    stores = jax.tree.map(lambda a: jnp.stack([a] * 3), store)
    values = jnp.int32([5, 6, 7])
    batch, (seen, _) = jax.jit(jax.vmap(one_round))(stores, values)
    np.testing.assert_array_equal(seen, values)
    one = jax.jit(one_round)
    for i, value in enumerate(values):
        alone, _ = one(store, value)
        assert_same(jax.tree.map(lambda a, i=i: a[i], batch), alone)


def capture(store, rows, call=rs.capture):
    for layer in range(MODEL.num_hidden_layers):
        store, refused = call(store, rows, layer, *payload(3))
        assert not refused.any()
    return store


def test_a_store_survives_tree_round_trips():
    store, lease, rows = held_store()
    store = capture(store, rows)
    flat, structure = jax.tree.flatten(store)
    again = jax.tree.unflatten(structure, flat)
    assert isinstance(again, type(store))
    assert_same(again, store)
    assert rs.plan(again, lease, rows.live)[0].live.any()
    assert_same(rs.release(again, lease)[0], rs.release(store, lease)[0])


def test_a_donated_store_is_updated_in_place():
    store, _, rows = held_store()
    expected = jax.tree.map(np.array, capture(store, rows))  # copies
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(store)]
    write = jax.jit(rs.capture, static_argnames="layer", donate_argnums=0)
    donated = capture(store, rows, write)
    assert store.held.is_deleted()
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(donated)] == pointers
    assert_same(donated, expected)
