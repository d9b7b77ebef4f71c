"""What the reference store says on the host: sizes, misuse, and what was refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from store_cases import CAPACITY, MODEL, held_store, payload

from sparse_loop_jax.models.config import OURO_1_4B
from sparse_loop_jax.sparse import SparseDecodeConfig, StaleLeaseError, store as rs


def test_check_raises_with_what_was_refused():
    rs.check(capture=jnp.zeros((2, 3), bool), release=0)
    with pytest.raises(StaleLeaseError, match=r"refused \(capture: 2, release: 3\)"):
        rs.check(capture=jnp.array([True, True, False]), consume=np.zeros(4, bool), release=3)
    assert issubclass(StaleLeaseError, RuntimeError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s, a, p: rs.plan(s, a, jnp.ones((2, 4), bool)),
            r"live must be of shape \(2, 3",
        ),
        (
            lambda s, a, p: rs.accept(s, a, jnp.zeros((3,), jnp.int32)),
            r"accepted .*\(2,\), got",
        ),
        (lambda s, a, p: rs.capture(s, p, 2, *payload(1)), "2 layers, got layer 2"),
        (lambda s, a, p: rs.capture(s, p, -1, *payload(1)), "2 layers, got layer -1"),
        (lambda s, a, p: rs.consume(s, p, 5), "2 layers, got layer 5"),
        (lambda s, a, p: rs.capture(s, p, 0, *payload(1, (2, 2))), r"counts .*\(2, 3\), got"),
        (
            lambda s, a, p: rs.capture(
                s, p, 0, payload(1)[0], payload(1)[1].astype(jnp.int32), *payload(1)[2:]
            ),
            r"positions must be uint16 \(2, 3, 3, 5\), got int32",
        ),
        (
            lambda s, a, p: rs.capture(s, p, 0, *payload(1)[:3], payload(1)[3][..., :2]),
            r"base must be float32 \(2, 3, 3, 4\), got float32 \(2, 3, 3, 2\)",
        ),
        (
            lambda s, a, p: rs.capture(
                s, p, 0, *payload(1)[:2], payload(1)[2].astype(jnp.bfloat16), payload(1)[3]
            ),
            "mass must be float32 .*, got bfloat16",
        ),
    ],
)
def test_misuse_is_refused_while_tracing(call, message):
    store, lease, rows = held_store()
    with pytest.raises(ValueError, match=message):
        call(store, lease, rows)


@pytest.mark.parametrize("name", ["slots", "capacity", "max_tokens"])
@pytest.mark.parametrize("value", [0, -3, True, 2.0])
def test_bad_sizes_are_refused(name, value):
    sizes = {"slots": 2, "capacity": 2, "max_tokens": 9} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value}"):
        rs.create(MODEL, **sizes)


@pytest.mark.parametrize("max_tokens", [None, 65536, 65537])
def test_bytes_are_known_before_allocation(max_tokens):
    config = SparseDecodeConfig()
    sizes = {"slots": 7, "capacity": CAPACITY, "max_tokens": max_tokens}
    store = rs.create(MODEL, **sizes)
    assert rs.nbytes_for(config, MODEL, **sizes) == store.nbytes
    assert store.index_dtype == (jnp.uint32 if max_tokens == 65537 else jnp.uint16)
    assert rs.nbytes_for(SparseDecodeConfig(key_retention=1.0), MODEL, **sizes) == 0


def test_bytes_of_a_served_model():
    """64 sequences x 4 rows x 2 rounds of Ouro-1.4B at the longest context, r = 0.1."""
    capacity = SparseDecodeConfig(key_retention=0.1).capacity_for(65536)
    nbytes = rs.nbytes_for(SparseDecodeConfig(), OURO_1_4B, 512, capacity)
    assert nbytes == 512 * (9 + 24 * 16 * (2 * 6554 + 4 + 4 * 128))
