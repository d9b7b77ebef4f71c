"""Every implementation of `sparse_attention` against NumPy in float64."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from sparse_loop_jax.kernels.capture_attention import capture_attention
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.xla import sparse_attention_xla

CAPACITY = 12
ROWS = [[0, 1], [2, 15], [16, 17], [45, 44]]
# Query heads per kv head, head size, dtype; the rest has one shape, so that tests share
# their programs.
SHAPES = [(2, 16, "float32"), (4, 16, "float32"), (1, 64, "bfloat16")]
TOLERANCE = {"float32": (3e-6, 3e-6), "bfloat16": (1e-6, 2**-8)}


@pytest.fixture(scope="module", params=sorted(sparse_attention.implementations))
def attend(request, bind):
    return bind(sparse_attention, request.param)


@pytest.fixture
def make_case(paged_case):
    def make(lengths=ROWS, group=2, head_dim=16, dtype="float32", **options):
        used = sum(-(-max(rows) // 16) for rows in lengths)
        return paged_case(
            lengths,
            heads=4,
            kv_heads=4 // group,
            head_dim=head_dim,
            dtype=dtype,
            max_pages=4,
            spare_pages=14 - used,
            **options,
        )

    return make


def selections(case, dtype=jnp.uint16, seed: int = 0):
    """Random references of each row and head: positions, counts, mass, base."""
    rng = np.random.default_rng(seed)
    batch, rows, heads, dim = case.q.shape
    lengths = np.asarray(case.lengths)
    counts = np.minimum(lengths, rng.integers(1, CAPACITY + 1, lengths.shape))
    positions = np.zeros((batch, rows, heads, CAPACITY), np.int64)
    for b, i, h in np.ndindex(batch, rows, heads):
        kept = rng.choice(max(lengths[b, i], 1), counts[b, i], replace=False)
        positions[b, i, h, : counts[b, i]] = np.sort(kept)
    mass = rng.random((batch, rows, heads), np.float32)
    base = rng.standard_normal((batch, rows, heads, dim), np.float32)
    return (
        jnp.asarray(positions, dtype),
        jnp.asarray(counts, jnp.int32),
        jnp.asarray(mass),
        jnp.asarray(base),
    )


def inputs(case, selection):
    return case.q, case.k_pool, case.v_pool, case.page_table, *selection


def check(case, selection, out: jax.Array) -> None:
    """Fails unless `out` is base + mass * softmax_S(q K_S) V_S of each row."""
    positions, counts, mass, base = map(np.asarray, selection)
    batch, rows, heads, dim = case.q.shape
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    q = np.asarray(case.q, np.float64)
    expected = np.zeros(q.shape)
    for b, i, h in itertools.product(range(batch), range(rows), range(heads)):
        kept = positions[b, i, h, : counts[b, i]].astype(int)
        if not len(kept):
            continue
        kv = h // (heads // case.k.shape[2])
        weights = np.exp(case.k[b, kept, kv] @ q[b, i, h] / math.sqrt(dim))
        mean = weights @ case.v[b, kept, kv] / weights.sum()
        expected[b, i, h] = base[b, i, h] + mass[b, i, h] * mean
    atol, rtol = TOLERANCE[str(out.dtype)]
    out64 = np.asarray(out.astype(jnp.float32), np.float64)
    np.testing.assert_array_equal(out64[counts == 0], 0)
    np.testing.assert_allclose(out64, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES)
def test_matches_the_oracle(attend, make_case, group, head_dim, dtype):
    case = make_case(group=group, head_dim=head_dim, dtype=dtype)
    selection = selections(case)
    check(case, selection, attend(*inputs(case, selection)))


MUTATIONS = {
    "mass left out": lambda s, o_ref: (s[0], s[1], jnp.ones_like(s[2]), s[3]),
    "C_ref not subtracted": lambda s, o_ref: (*s[:3], o_ref),
    "one key too many": lambda s, o_ref: (s[0], s[1] + (s[1] > 0), s[2], s[3]),
    "one key too few": lambda s, o_ref: (s[0], s[1] - (s[1] > 1), s[2], s[3]),
    "another row's positions": lambda s, o_ref: (jnp.roll(s[0], 1, axis=1), *s[1:]),
    "another head's positions": lambda s, o_ref: (jnp.roll(s[0], 1, axis=2), *s[1:]),
    "another row's base": lambda s, o_ref: (*s[:3], jnp.roll(s[3], 1, axis=0)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_sees_a_wrong_formula(attend, make_case, mutation):
    case = make_case([[20, 22], [30, 33], [8, 25], [40, 41]])
    selection = selections(case)
    check(case, selection, attend(*inputs(case, selection)))
    wrong = MUTATIONS[mutation](selection, selection[3] + 0.1)
    out = attend(*inputs(case, wrong))
    with pytest.raises(AssertionError):
        check(case, selection, out)


def test_only_kept_rows_matter(attend, make_case):
    """NaN and infinity everywhere else, page 0 included, change no bit."""
    case = make_case([[12, 30], [0, 0], [17, 0], [3, 9]], unallocated="poison")
    selection = selections(case)
    out = attend(*inputs(case, selection))
    positions, counts = np.asarray(selection[0]), np.asarray(selection[1])
    pages, _, size, _ = case.k_pool.shape
    group = case.q.shape[2] // case.k_pool.shape[1]
    keep = np.zeros((pages, case.k_pool.shape[1], size), bool)
    for b, i, h in np.ndindex(*case.q.shape[:3]):
        for position in positions[b, i, h, : counts[b, i]].astype(int):
            keep[case.page_table[b, position // size], h // group, position % size] = True
    assert keep.any()
    assert not keep.all()
    for junk in (np.nan, np.inf):
        k, v = (jnp.where(keep[..., None], pool, junk) for pool in case.args[1:3])
        again = attend(case.q, k, v, case.page_table, *selection)
        np.testing.assert_array_equal(again, out)


def test_a_stale_tail_is_not_read(attend, make_case):
    """Entries past the count, left by an earlier and longer row, change no bit."""
    case = make_case([[9, 10], [33, 30], [0, 0], [20, 1]])
    selection = selections(case)
    out = attend(*inputs(case, selection))
    entry = jax.lax.broadcasted_iota(jnp.int32, selection[0].shape, 3)
    for junk in (1, 40, 65535):
        stale = entry >= selection[1][..., None, None]
        positions = jnp.where(stale, jnp.uint16(junk), selection[0])
        again = attend(*inputs(case, (positions, *selection[1:])))
        np.testing.assert_array_equal(again, out)


def test_rows_without_a_reference_give_zeros(attend, make_case):
    """Whatever mass, base, positions and page table hold, and with page 0 poisoned."""
    case = make_case([[9, 9], [30, 30], [1, 2], [45, 3]])
    positions, counts, mass, base = selections(case)
    counts = counts.at[0].set(0).at[1, 1].set(0)
    base = base.at[0].set(jnp.nan)
    mass = mass.at[0].set(jnp.nan)
    # The first request's pages are page 0, which belongs to it alone and is poisoned.
    swap = case.page_table[0, 0]
    order = jnp.arange(14).at[0].set(swap).at[swap].set(0)
    table = order.at[case.page_table].get(mode="fill", fill_value=14).at[0].set(0)
    k, v = (pool[order].at[0].set(jnp.nan) for pool in case.args[1:3])
    out = attend(case.q, k, v, table, positions, counts, mass, base)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(out[1, 1], 0)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_is_a_row_in_a_batch(attend, paged_case, dtype):
    """Alone in its batch and alone in its request; and again is the same."""
    case = paged_case([[300, 299], [200, 31], [90, 12]], heads=8, head_dim=64, dtype=dtype)
    selection = selections(case)
    batch = attend(*inputs(case, selection))
    np.testing.assert_array_equal(attend(*inputs(case, selection)), batch)
    for b, i in np.ndindex(3, 2):
        row = (slice(b, b + 1), slice(i, i + 1))
        alone = attend(
            case.q[row],
            case.k_pool,
            case.v_pool,
            case.page_table[b : b + 1],
            *(array[row] for array in selection),
        )
        np.testing.assert_array_equal(alone[0, 0], batch[b, i], f"row {i} of request {b}")


def test_uint32_positions_give_the_same(attend, make_case):
    case = make_case()
    np.testing.assert_array_equal(
        attend(*inputs(case, selections(case))),
        attend(*inputs(case, selections(case, jnp.uint32))),
    )


def test_the_reference_never_builds_the_context():
    """No array of the program is as large as the tokens of one kv head."""
    batch, heads, dim, size, max_pages, capacity = 2, 4, 8, 16, 512, 3
    pool = jax.ShapeDtypeStruct((batch * max_pages, 1, size, dim), jnp.float32)
    row = (batch, 1, heads)
    jaxpr = jax.make_jaxpr(sparse_attention_xla)(
        jax.ShapeDtypeStruct((*row, dim), jnp.float32),
        pool,
        pool,
        jax.ShapeDtypeStruct((batch, max_pages), jnp.int32),
        jax.ShapeDtypeStruct((*row, capacity), jnp.uint16),
        jax.ShapeDtypeStruct((batch, 1), jnp.int32),
        jax.ShapeDtypeStruct(row, jnp.float32),
        jax.ShapeDtypeStruct((*row, dim), jnp.float32),
    )
    sizes = list(sizes_of(jaxpr.jaxpr))
    assert max(sizes) >= batch * heads * capacity * dim
    assert max(sizes) < batch * max_pages * size


def sizes_of(jaxpr):
    """Elements of everything that the equations of a jaxpr make, nested ones included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(variable.aval.shape) for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_of(inner)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("h4_n14_d16_f0.1", "float32"),
        ("h1_n129_d64_f0.25", "float32"),
        ("h1_n65_d128_f0.02", "float32"),
        ("h2_n40_d128_f0.1_bf16", "bfloat16"),
        ("h3_n33_d32_f1", "float32"),
    ],
)
def test_gold_capture_and_consume(attend, bind, gold_ops, case, dtype):
    """`dense_source_selector`, then `cached_mass_sparse_delta` on another q, K and V."""
    x = {
        name.rsplit("/", 1)[1]: gold_ops[name]
        for name in gold_ops
        if name.startswith(f"capture_consume/{case}/")
    }
    heads, keys = x["k1"].shape[1:3]
    k = x["indices"].shape[-1]
    size = 16
    pages = -(-keys // size)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)[None]

    def paged(array):
        pool = np.full((pages, heads, size, array.shape[-1]), np.nan, np.float32)
        for token in range(keys):
            pool[table[0, token // size], :, token % size] = array[0, :, token]
        return jnp.asarray(pool, dtype)

    def rows(array):  # [1, heads, 1, d] to [B, n, heads, d]
        return jnp.asarray(array.transpose(0, 2, 1, 3), dtype)

    capture = bind(capture_attention, "xla", static_argnames=("capacity",))
    count = jnp.full((1, 1), k, jnp.int32)
    captured = capture(
        rows(x["q1"]), paged(x["k1"]), paged(x["v1"]), jnp.asarray(table),
        jnp.full((1, 1), keys, jnp.int32), count, capacity=k + 3,
    )  # fmt: skip
    positions, mass = captured.positions[0, 0], captured.mass[0, 0]
    np.testing.assert_array_equal(positions[:, :k], x["indices"][0, :, 0])
    np.testing.assert_allclose(mass, x["mass"][0, :, 0, 0], atol=1e-5)
    c_ref = x["mass"][0, :, 0] * x["selected_output"][0, :, 0]
    # The package rounds probabilities and this output to the dtype of its inputs.
    rounding = {"float32": 0.0, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(captured.kept[0, 0], c_ref, atol=1e-5, rtol=rounding)
    o_ref = np.asarray(captured.out.astype(jnp.float32))[0, 0]
    np.testing.assert_allclose(o_ref, x["o_ref"][0, :, 0], atol=1e-5, rtol=rounding)

    base = captured.out.astype(jnp.float32) - captured.kept
    out = attend(
        rows(x["q2"]), paged(x["k2"]), paged(x["v2"]), jnp.asarray(table),
        captured.positions, count, captured.mass, base,
    )  # fmt: skip
    expected = x["o_ref"][0, :, 0] + x["delta"][0, :, 0]
    out = np.asarray(out.astype(jnp.float32))[0, 0]
    np.testing.assert_allclose(out, expected, atol=1e-5 + rounding, rtol=rounding)


def test_all_gold_cases_are_used(gold_ops):
    cases = {name.split("/")[1] for name in gold_ops if name.startswith("capture_consume/")}
    assert len(cases) == 5
