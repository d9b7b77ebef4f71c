"""Every implementation of `paged_attention` against NumPy in float64."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import paged_attention

PAGE = 16
# Around nothing, around a page, and beyond several pages.
LENGTHS = [0, 1, 2, 3, 15, 16, 17, 31, 33, 85]
ROWS = [[0, 1, 2], [3, 0, 15], [16, 17, 18], [31, 32, 33], [85, 84, 83], [0, 0, 0]]
# (atol, rtol) of outputs of order 1: float32 sums, or one rounding to bfloat16 of the
# output and one of the softmax weights.
TOLERANCE = {"float32": (2e-6, 2e-6), "bfloat16": (2e-3, 2**-7)}


@pytest.fixture(params=sorted(paged_attention.implementations))
def attend(request, bind):
    return bind(paged_attention, request.param)


def check(case, out: jax.Array) -> None:
    """Fails unless `out` is the attention of `case`."""
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    atol, rtol = TOLERANCE[str(case.q.dtype)]
    out64 = np.asarray(out.astype(jnp.float32), np.float64)
    np.testing.assert_array_equal(out64[np.asarray(case.lengths) == 0], 0.0)
    np.testing.assert_allclose(out64, case.attention(), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [(1, 16, "float32"), (4, 64, "float32"), (1, 64, "bfloat16"), (4, 16, "bfloat16")],
)
@pytest.mark.parametrize("lengths", [LENGTHS, ROWS], ids=["decode", "rows"])
def test_matches_the_oracle(attend, paged_case, lengths, group, head_dim, dtype):
    case = paged_case(
        lengths, heads=2 * group, kv_heads=2, head_dim=head_dim, page_size=PAGE, dtype=dtype
    )
    check(case, attend(*case.args))


def test_mixed_dtypes_give_the_dtype_of_q(attend, paged_case):
    case = paged_case(LENGTHS, dtype="bfloat16")
    case = case.replace(q=case.q.astype(jnp.float32))
    check(case, attend(*case.args))


def test_a_chunk_of_a_prefill(attend, paged_case):
    lengths = np.arange(40, 72)[None].repeat(2, axis=0) - [[0], [33]]
    case = paged_case(lengths, page_size=PAGE)
    check(case, attend(*case.args))


@pytest.mark.parametrize("page_size", [4, 32])
def test_other_page_sizes(attend, paged_case, page_size):
    case = paged_case(LENGTHS, page_size=page_size)
    check(case, attend(*case.args))


def test_rows_see_no_more_than_the_table_holds(attend, paged_case):
    case = paged_case([[32, 31], [9, 10]], max_pages=2)
    held = attend(*case.args)
    beyond = case.replace(lengths=jnp.where(case.lengths == 32, 1000, case.lengths))
    np.testing.assert_array_equal(attend(*beyond.args), held)


# What must not be read -------------------------------------------------------------------


@pytest.mark.parametrize("junk", ["a page of NaN", -1, np.iinfo(np.int32).max])
def test_unused_entries_of_the_table_may_hold_anything(attend, paged_case, junk):
    clean = paged_case(LENGTHS)
    table = np.asarray(clean.page_table).copy()
    pages = clean.k_pool.shape[0]
    if isinstance(junk, str):
        junk = np.setdiff1d(np.arange(pages), table)[0]
        assert np.isnan(np.asarray(clean.k_pool)[junk]).all()
    table[table == pages] = junk
    case = clean.replace(page_table=jnp.asarray(table))
    out = attend(*case.args)
    check(case, out)
    np.testing.assert_array_equal(out, attend(*clean.args))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pool", ["k_pool", "v_pool"])
def test_a_row_never_reads_what_only_its_neighbour_sees(attend, paged_case, pool, value):
    # Request 0 has rows that see 17, 18 and 19 keys: position 18 belongs to the last alone.
    clean = paged_case([[17, 18, 19], [5, 6, 7]])
    page = clean.page_table[0, 1]
    poisoned = getattr(clean, pool).at[page, :, 18 - PAGE].set(value)
    out = np.asarray(attend(*clean.replace(**{pool: poisoned}).args))
    expected = np.asarray(attend(*clean.args))
    np.testing.assert_array_equal(out[0, :2], expected[0, :2])
    np.testing.assert_array_equal(out[1], expected[1])
    assert not np.isfinite(out[0, 2]).all()


@pytest.mark.parametrize("pool", ["k_pool", "v_pool"])
def test_a_visible_nan_is_not_hidden(attend, paged_case, pool):
    clean = paged_case([17, 18], heads=4, kv_heads=2)
    page = clean.page_table[1, 1]
    poisoned = getattr(clean, pool).at[page, 1, 1, 3].set(np.nan)
    out = np.asarray(attend(*clean.replace(**{pool: poisoned}).args))
    expected = np.asarray(attend(*clean.args))
    assert np.isnan(out[1, 0, 2:, 3]).all()
    np.testing.assert_array_equal(out[1, 0, :2], expected[1, 0, :2])
    np.testing.assert_array_equal(out[0], expected[0])


def test_dead_rows_are_zeros_whatever_their_query_holds(attend, paged_case):
    case = paged_case([[0, 5], [0, 0]])
    case = case.replace(q=jnp.where(case.lengths[..., None, None] == 0, jnp.nan, case.q))
    out = np.asarray(attend(*case.args))
    np.testing.assert_array_equal(out[np.asarray(case.lengths) == 0], 0.0)
    assert np.isfinite(out).all()


# Independence ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_alone_equals_itself_in_a_batch(attend, paged_case, dtype):
    case = paged_case(ROWS, dtype=dtype)
    together = np.asarray(attend(*case.args))
    for b in range(len(ROWS)):
        pick = slice(b, b + 1)
        alone = attend(
            case.q[pick], case.k_pool, case.v_pool, case.page_table[pick], case.lengths[pick]
        )
        np.testing.assert_array_equal(np.asarray(alone)[0], together[b])


def test_a_wider_table_changes_nothing(attend, paged_case):
    case = paged_case(ROWS)
    wide = paged_case(ROWS, max_pages=2 * case.page_table.shape[1])
    np.testing.assert_array_equal(case.k_pool, wide.k_pool)
    np.testing.assert_array_equal(attend(*wide.args), attend(*case.args))


def test_a_row_alone_equals_itself_among_rows(attend, paged_case):
    # Within rounding: a product of one row may take another path than one of three.
    case = paged_case(ROWS)
    together = np.asarray(attend(*case.args))
    for i in range(3):
        alone = case.replace(q=case.q[:, i : i + 1], lengths=case.lengths[:, i : i + 1])
        out = np.asarray(attend(*alone.args))
        np.testing.assert_allclose(out[:, 0], together[:, i], atol=1e-6)


def test_repeats_are_bit_equal(attend, paged_case):
    case = paged_case(ROWS)
    first = np.asarray(attend(*case.args))
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(attend(*case.args)), first)


# The checker itself ----------------------------------------------------------------------


def mutations(case, attend):
    """Wrong answers of the kinds that kernels give, by name."""
    right = attend(*case.args)
    dead = case.lengths == 0
    yield "zeros", jnp.zeros_like(right)
    yield "dead row not zero", jnp.where(dead[..., None, None], 1e-3, right).astype(right.dtype)
    yield "one NaN", right.at[0, 0, 0, 0].set(jnp.nan)
    yield "another dtype", right.astype(jnp.float16)
    yield "heads swapped", right[:, :, ::-1]
    group = case.q.shape[2] // case.k_pool.shape[1]
    tiled = jnp.arange(case.q.shape[2]).reshape(-1, group).T.reshape(-1)
    yield "interleaved groups", attend(*case.replace(q=case.q[:, :, tiled]).args)
    yield "no scale", attend(*case.replace(q=case.q * case.q.shape[-1] ** 0.5).args)
    yield "K for V", attend(*case.replace(v_pool=case.k_pool).args)
    swapped = case.page_table.at[jnp.array([2, 3]), 0].set(
        case.page_table[jnp.array([3, 2]), 0]
    )
    yield "a neighbour's page", attend(*case.replace(page_table=swapped).args)
    pair = case.page_table.at[3, :2].set(case.page_table[3, 1::-1])
    yield "pages out of order", attend(*case.replace(page_table=pair).args)
    batch, rows = case.lengths.shape
    for b, i, step in itertools.product(range(batch), range(rows), (-1, 1)):
        other = case.lengths[b, i] + step
        # The same page must hold the key: a further one is NaN and would be found anyway.
        if case.lengths[b, i] > 1 and (step < 0 or case.lengths[b, i] % PAGE):
            moved = case.lengths.at[b, i].set(other)
            yield f"length {step:+d} of {b, i}", attend(*case.replace(lengths=moved).args)


def _passes(case, out) -> bool:
    try:
        check(case, out)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checker_finds_wrong_answers(bind, paged_case, dtype):
    attend = bind(paged_attention, "xla")
    case = paged_case([[0, 1, 2], [3, 0, 15], [15, 16, 17], [31, 32, 33]], dtype=dtype)
    # Finite where no request looks, so that a read past a length is a plausible number.
    fill = {name: jnp.nan_to_num(getattr(case, name), nan=0.5) for name in ("k_pool", "v_pool")}
    case = case.replace(**fill)
    check(case, attend(*case.args))
    wrong = dict(mutations(case, attend))
    assert len(wrong) > 20
    assert [name for name, out in wrong.items() if _passes(case, out)] == []
