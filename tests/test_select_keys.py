"""The exact selection of keys, against a stable sort."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparse_loop_jax.kernels.select_keys import select_keys
from sparse_loop_jax.kernels.select_keys.xla import ordered_keys

SPAN, CAPACITY = 24, 10
SPECIALS = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.0, -70000.0, 3.4e38]


@pytest.fixture(scope="module", params=sorted(select_keys.implementations))
def select(request, bind):
    bound = bind(select_keys, request.param, static_argnames=("capacity", "index_dtype"))
    return functools.partial(bound, capacity=CAPACITY, index_dtype=jnp.uint16)


def expected(scores, count: int) -> list[int]:
    """Positions of the `count` largest: NaN last, equal ones by position."""
    scores = np.asarray(scores, np.float32)
    missing = np.isnan(scores)
    order = np.lexsort((np.arange(len(scores)), -np.where(missing, 0, scores), missing))
    return sorted(order[:count].tolist())


def select_one(select, scores, count: int, padding: float = np.nan) -> list[int]:
    row = np.full((1, SPAN), padding, np.float32)
    row[0, : len(scores)] = scores
    out = select(row, jnp.int32([len(scores)]), jnp.int32([count]))
    assert (np.asarray(out)[0, count:] == 0).all()
    return np.asarray(out)[0, :count].tolist()


scores_of_a_row = st.lists(
    st.sampled_from(SPECIALS) | st.floats(width=32) | st.integers(-2, 2).map(float),
    min_size=1,
    max_size=SPAN,
)


@given(scores=scores_of_a_row, share=st.floats(0, 1), padding=st.sampled_from(SPECIALS))
@settings(max_examples=500, deadline=None, database=None)
def test_any_row_keeps_what_a_stable_sort_keeps(select, scores, share, padding):
    count = min(round(share * len(scores)), CAPACITY)
    assert select_one(select, scores, count, padding) == expected(scores, count)


@pytest.mark.parametrize(
    ("scores", "count", "kept"),
    [
        pytest.param([-0.0, 0.0, -0.0], 2, [0, 1], id="zeros are equal"),
        pytest.param([0.0, -0.0, 1.0], 2, [0, 2], id="zeros are equal, other order"),
        pytest.param([np.nan, -np.inf, 2.0], 2, [1, 2], id="NaN after -inf"),
        pytest.param([np.nan, np.nan, 5.0], 2, [0, 2], id="NaN when numbers run out"),
        pytest.param([-70000.0, -65504.0, -80000.0], 1, [1], id="below float16"),
        pytest.param([-70001.0, -70000.0, -70002.0], 2, [0, 1], id="float16 would tie"),
        pytest.param([-np.inf, -np.inf], 1, [0], id="all -inf"),
        pytest.param([1e-45, -1e-45, 0.0], 2, [0, 2], id="denormals are not zero"),
        pytest.param([7.0] * 9, 4, [0, 1, 2, 3], id="ties go to the lower position"),
        pytest.param([3.0, 9.0, 3.0, 9.0, 3.0], 3, [0, 1, 3], id="tie at the cut"),
    ],
)
def test_named_rows(select, scores, count, kept):
    assert select_one(select, scores, count) == kept
    assert select_one(select, scores, count, padding=np.inf) == kept


def test_padding_is_never_chosen_even_if_more_is_asked_for(select):
    scores = jnp.full((3, SPAN), jnp.inf)
    out = select(scores, jnp.int32([2, 0, 30]), jnp.int32([5, 3, 99]))
    np.testing.assert_array_equal(out[0], [0, 1] + [0] * 8)
    np.testing.assert_array_equal(out[1], [0] * 10)
    np.testing.assert_array_equal(out[2], range(10))


def test_negative_counts_keep_nothing(select):
    out = select(jnp.ones((1, SPAN)), jnp.int32([4]), jnp.int32([-1]))
    np.testing.assert_array_equal(out, np.zeros((1, CAPACITY)))


def test_batches_of_rows_with_their_own_lengths(select):
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 4, (5, 3, 40)).astype(np.float32)
    lengths = rng.integers(0, 41, (5, 3)).astype(np.int32)
    counts = np.minimum(rng.integers(0, 9, (5, 3)), lengths).astype(np.int32)
    out = select(scores, lengths, counts, capacity=8, index_dtype=jnp.uint32)
    assert out.dtype == jnp.uint32
    for row in np.ndindex(5, 3):
        kept = expected(scores[row][: lengths[row]], int(counts[row]))
        assert np.asarray(out[row]).tolist() == kept + [0] * (8 - len(kept))


@pytest.mark.parametrize("levels", [None, 5], ids=["distinct", "ties"])
def test_exact_at_65536_keys(select, levels):
    rng = np.random.default_rng(1)
    size = (1, 1 << 16)
    scores = rng.standard_normal(size) if levels is None else rng.integers(0, levels, size)
    scores = scores.astype(np.float32)
    scores[0, -1] = 9.0  # the highest position that uint16 can name
    out = select(scores, jnp.int32([1 << 16]), jnp.int32([6554]), capacity=6600)
    assert out.dtype == jnp.uint16
    assert np.asarray(out)[0, :6554].tolist() == expected(scores[0], 6554)
    assert int(out[0, 6553]) == 65535


def test_keys_order_as_floats_do():
    values = np.array([-np.inf, -3.4e38, -1, -1e-45, 0, 1e-45, 1, 3.4e38, np.inf], np.float32)
    keys = np.asarray(ordered_keys(jnp.asarray(values)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    nan, minus_zero = np.asarray(ordered_keys(jnp.array([np.nan, -0.0], jnp.float32)))
    assert nan < keys[0]
    assert minus_zero == keys[4]


def test_vmap_is_a_batch():
    scores = np.random.default_rng(2).standard_normal((3, 2, SPAN)).astype(np.float32)
    lengths = np.full((3, 2), SPAN, np.int32)
    counts = np.full((3, 2), 5, np.int32)
    one = jax.jit(functools.partial(select_keys, capacity=CAPACITY, implementation="xla"))
    np.testing.assert_array_equal(
        jax.vmap(one)(scores, lengths, counts), one(scores, lengths, counts)
    )


def test_gold_selections(select, gold_ops, gold_manifest):
    """`select_decode_keys` of FlashLoop; where equal weights lie on both sides of the cut,
    the kept weights and their sum are defined and the positions are not."""
    cases = [c for c in gold_manifest["ops"]["cases"] if c["op"] == "select_decode_keys"]
    assert len(cases) > 50
    span, capacity, heads = 1000, 257, 6
    for case in cases:
        path = f"select/{case['name']}"
        weights = gold_ops[f"{path}/weights"]
        weights = weights.reshape(-1, weights.shape[-1])
        indices = gold_ops[f"{path}/indices"].reshape(len(weights), -1)
        mass = gold_ops[f"{path}/mass"].reshape(-1)
        scores = np.full((heads, span), np.nan, np.float32)
        scores[: len(weights), : weights.shape[1]] = weights
        keys, k = weights.shape[1], indices.shape[1]
        out = select(
            scores,
            jnp.full((heads,), keys, jnp.int32),
            jnp.full((heads,), k, jnp.int32),
            capacity=capacity,
        )
        out = np.asarray(out)[: len(weights), :k].astype(np.int32)
        kept = np.take_along_axis(weights, out, axis=1)
        np.testing.assert_array_equal(
            np.sort(kept), np.sort(np.take_along_axis(weights, indices, axis=1)), case["name"]
        )
        np.testing.assert_allclose(kept.sum(axis=1), mass, atol=1e-6, err_msg=case["name"])
        if not case["boundary_tie"]:
            np.testing.assert_array_equal(out, indices, case["name"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": jnp.zeros((2, 4), jnp.bfloat16)}, "scores must be float32, got bfloat16"),
        ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths must be integers of shape \(2,\)"),
        ({"counts": jnp.zeros((2,))}, r"counts must be integers .* got float32 \(2,\)"),
        ({"capacity": 0}, "capacity must be a positive integer, got 0"),
        ({"capacity": True}, "capacity must be a positive integer, got True"),
        ({"index_dtype": jnp.int32}, "index_dtype must be uint16 or uint32"),
        ({"scores": jnp.zeros((2, 65537))}, "65537 scores do not fit uint16; use uint32"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {
        "scores": jnp.zeros((2, 4)),
        "lengths": jnp.zeros((2,), jnp.int32),
        "counts": jnp.zeros((2,), jnp.int32),
        "capacity": 2,
        "index_dtype": jnp.uint16,
    } | change
    scores, lengths, counts = (arguments.pop(n) for n in ("scores", "lengths", "counts"))
    with pytest.raises(ValueError, match=message):
        select_keys(scores, lengths, counts, implementation="xla", **arguments)
