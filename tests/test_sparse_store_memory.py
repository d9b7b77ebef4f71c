"""Acceptance and release touch metadata alone: what XLA compiled says so."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from sparse_loop_jax.models.config import OURO_1_4B
from sparse_loop_jax.sparse import SparseDecodeConfig, store as rs

SEQUENCES, ROWS, ROUNDS = 64, 4, 2
SLOTS = SEQUENCES * ROWS * ROUNDS


def compile_for(function, capacity: int, *arguments):
    store = jax.eval_shape(lambda: rs.create(OURO_1_4B, slots=SLOTS, capacity=capacity))
    compiled = jax.jit(function, donate_argnums=0).lower(store, *arguments).compile()
    nbytes = rs.nbytes_for(SparseDecodeConfig(), OURO_1_4B, SLOTS, capacity)
    leaves = jax.tree.leaves(store)
    assert nbytes == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory, nbytes


def lease():
    return jax.eval_shape(
        lambda: rs.ReferenceLease(
            jnp.zeros((SEQUENCES, ROWS), jnp.int32),
            jnp.zeros((SEQUENCES, ROWS), jnp.uint32),
            jnp.array(True),
        )
    )


ACCEPTED = jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32)
CALLS = {
    "accept": (rs.accept, lambda: (lease(), ACCEPTED)),
    "release": (rs.release, lambda: (lease(),)),
    "reserve": (lambda s, wanted: rs.reserve(s, wanted, ROWS), lambda: (ACCEPTED,)),
}


@pytest.mark.parametrize("capacity", [6554, 65536])
@pytest.mark.parametrize("call", CALLS)
def test_metadata_operations_leave_the_payload_in_place(call, capacity):
    function, arguments = CALLS[call]
    memory, nbytes = compile_for(function, capacity, *arguments())
    assert memory.temp_size_in_bytes <= 64 << 10
    assert memory.alias_size_in_bytes == nbytes


def test_the_measure_sees_a_rewritten_payload():
    """The same analysis of an acceptance that moves the payload as well."""

    def compacting(store, lease, accepted):
        store = rs.accept(store, lease, accepted)
        order = jnp.argsort(store.count)
        return jax.tree.map(lambda array: array[order], store)

    memory, _ = compile_for(compacting, 6554, lease(), ACCEPTED)
    assert memory.temp_size_in_bytes > 64 << 10
