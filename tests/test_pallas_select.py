"""The selection kernel, with the layouts that only large rows would choose.

`test_select_keys` holds every implementation to the contract. Here rows are longer than what
a program keeps in registers, at sizes that the interpreter can bear.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels.select_keys.layout import RESIDENT, SelectConfig, choose_config
from sparse_loop_jax.kernels.select_keys.pallas import select_keys_pallas, select_rows
from sparse_loop_jax.kernels.select_keys.pallas_kernel import (
    HIGHEST,
    LOWEST,
    NAN,
    ZERO,
    _value,
    ordered_keys,
)

SPAN, CAPACITY = 1300, 1200
LAYOUTS = {
    "all in registers": SelectConfig(num_warps=2, groups=8),
    "most read again": SelectConfig(num_warps=1, groups=2),
    "a tail": SelectConfig(num_warps=1, groups=4, tail=2),
    "short rows apart": SelectConfig(num_warps=1, groups=8, tail=1, short=4),
}


def expected(scores: np.ndarray, count: int) -> list[int]:
    missing = np.isnan(scores)
    order = np.lexsort((np.arange(len(scores)), -np.where(missing, 0, scores), missing))
    return sorted(order[:count].tolist())


def awkward_rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((14, SPAN)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows[2] = 1.0
    rows[3] = np.where(rows[3] > 0, 0.0, -0.0)
    rows[4, ::3] = np.nan
    rows[5, ::3] = -np.nan
    rows[6] = np.nan
    rows[7, ::2] = np.inf
    rows[8, 1::2] = -np.inf
    rows[9] = -65504 - np.abs(rows[9])
    rows[10] *= 1e-42
    rows[11] *= 1e36
    rows[12] = 2.0 ** np.linspace(-140, 120, SPAN)  # evenly spread over all exponents
    rows[13, 700] = 1e5
    return rows


@pytest.fixture(scope="module", params=LAYOUTS)
def select(request):
    config = LAYOUTS[request.param]
    return jax.jit(functools.partial(select_keys_pallas, capacity=CAPACITY, config=config))


@pytest.mark.parametrize("length", [1, 127, 255, 700, SPAN - 3, SPAN])
def test_every_layout_selects_exactly(select, length):
    rows = awkward_rows()
    padded = rows.copy()
    padded[:, length:] = np.inf
    for count in {1, length // 10, length // 2, min(length, CAPACITY)}:
        counts = np.full(len(rows), count, np.int32)
        out = np.asarray(select(padded, np.full(len(rows), length, np.int32), counts))
        for i, row in enumerate(rows):
            want = expected(row[:length], count)
            assert out[i].tolist() == want + [0] * (CAPACITY - count), (i, count)


def test_rows_have_their_own_lengths_and_counts(select):
    rows = awkward_rows()
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, SPAN + 1, len(rows)).astype(np.int32)
    lengths[:2] = 0, SPAN
    counts = np.minimum(rng.integers(0, CAPACITY + 1, len(rows)), lengths).astype(np.int32)
    lengths[2:4], counts[2:4] = SPAN, 0
    out = np.asarray(select(rows, lengths, counts))
    for row, length, count, got in zip(rows, lengths, counts, out, strict=True):
        assert got[:count].tolist() == expected(row[:length], count)
        assert not got[count:].any()


def test_heads_share_lengths_and_counts():
    rng = np.random.default_rng(2)
    scores = jnp.asarray(rng.standard_normal((2, 3, 4, 40)), jnp.float32)
    lengths = jnp.array([[40, 7, 0], [1, 39, 20]], jnp.int32)
    counts = jnp.array([[4, 7, 0], [1, 9, 2]], jnp.int32)
    out = select_rows(scores, lengths, counts, capacity=9, index_dtype=jnp.uint32)
    assert out.dtype == jnp.uint32
    for b, i, h in np.ndindex(2, 3, 4):
        count = int(counts[b, i])
        want = expected(np.asarray(scores[b, i, h, : int(lengths[b, i])]), count)
        assert np.asarray(out[b, i, h]).tolist() == want + [0] * (9 - count)


def test_rows_go_into_their_slots():
    rng = np.random.default_rng(3)
    scores = jnp.asarray(rng.standard_normal((2, 2, 3, 40)), jnp.float32)
    lengths = jnp.array([[40, 7], [20, 39]], jnp.int32)
    counts = jnp.array([[4, 7], [2, 9]], jnp.int32)
    slots = jnp.array([[5, 6], [0, 9]], jnp.int32)  # of six
    poison = jnp.full((6, 3, 9), 0xDEAD, jnp.uint16)
    options = {"capacity": 9, "index_dtype": jnp.uint16}
    want = select_rows(scores, lengths, counts, **options)
    got = select_rows(scores, lengths, counts, **options, into=(slots, poison))
    np.testing.assert_array_equal(got, poison.at[5].set(want[0, 0]).at[0].set(want[1, 0]))


def test_no_rows_and_no_scores():
    zero = jnp.zeros((2, 0), jnp.int32)
    out = select_keys_pallas(jnp.zeros((2, 0, 5)), zero, zero, capacity=3)
    assert out.shape == (2, 0, 3)
    zero = jnp.zeros((2,), jnp.int32)
    out = select_keys_pallas(jnp.zeros((2, 0)), zero, zero, capacity=3)
    np.testing.assert_array_equal(out, np.zeros((2, 3)))


def test_keys_are_a_scale():
    values = [-np.inf, -3.4e38, -1, -1e-45, 0, 1e-45, 1, 3.4e38, np.inf]
    values = np.array(values, np.float32)
    keys = np.asarray(ordered_keys(jnp.asarray(values).view(jnp.int32))).astype(np.int64)
    assert (np.diff(keys) > 0).all()
    assert (keys[0], keys[4], keys[-1]) == (LOWEST, ZERO, HIGHEST)
    others = np.array([-0.0, np.nan, -np.nan], np.float32)
    np.testing.assert_array_equal(
        ordered_keys(jnp.asarray(others).view(jnp.int32)), [ZERO, NAN, NAN]
    )
    back = np.asarray(_value(jnp.asarray(keys, jnp.uint32)))
    np.testing.assert_array_equal(back.view(np.int32), values.view(np.int32))


def test_chosen_layouts_hold_a_row_as_far_as_registers_go():
    for span in (1, 24, 129, 8192, 20_000, 65_536):
        config = choose_config(span)
        assert min(span, RESIDENT) <= config.resident <= RESIDENT
        assert config.tail == (span > RESIDENT or config.short > 0)
        # 64 keys of 4 bytes a thread are half of its registers at 512 threads.
        assert config.groups * 4 <= 64
        assert config.num_warps <= 16
    # A table of 16,384 holds, as a rule, little more than the 8,192 that were too few.
    config = choose_config(16_384)
    short = dataclasses.replace(config, groups=config.short)
    assert 8192 + 512 < short.reach < config.resident == 16_384
    assert choose_config(8192).short == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_warps": 3, "groups": 1}, "num_warps must be a power of two, got 3"),
        ({"num_warps": 1, "groups": 0}, "groups must be a power of two, got 0"),
    ],
)
def test_a_layout_checks_itself(fields, message):
    with pytest.raises(ValueError, match=message):
        SelectConfig(**fields)
