"""Every implementation of `capture_attention` against NumPy in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import paged_attention
from sparse_loop_jax.kernels.capture_attention import capture_attention
from sparse_loop_jax.kernels.capture_attention.xla import capture_attention_xla
from sparse_loop_jax.sparse import retained_counts

CAPACITY = 12
STATIC = ("capacity", "index_dtype", "sink_keys", "recent_keys", "dense_implementation")
ROWS = [[0, 1], [2, 15], [16, 17], [45, 44]]
# Query heads per kv head, head size, dtype; the rest has one shape, so that tests share
# their programs.
SHAPES = [(2, 16, "float32"), (4, 16, "float32"), (1, 64, "bfloat16")]


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


@pytest.fixture(scope="module", params=sorted(capture_attention.implementations))
def capture(request, bind):
    bound = bind(capture_attention, request.param, static_argnames=STATIC)
    return functools.partial(bound, capacity=CAPACITY, index_dtype=jnp.uint16)


def counts_of(lengths, retention: float = 0.25) -> jax.Array:
    return jnp.asarray(retained_counts(retention, 64)[np.asarray(lengths)])


def probabilities(case, b: int, i: int, h: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, softmax and values of one row and head over its own keys, in float64."""
    length = int(case.lengths[b, i])
    kv = h // (case.q.shape[2] // case.k.shape[2])
    q = np.asarray(case.q[b, i, h], np.float64)
    scores = case.k[b, :length, kv] @ q / np.sqrt(len(q))
    p = np.exp(scores - scores.max())
    return scores, p / p.sum(), case.v[b, :length, kv]


def check(case, counts, out, sink_keys=0, recent_keys=0) -> None:
    """Fails unless positions, mass and kept are those of the case."""
    heads = case.q.shape[2]
    for b, i, h in itertools.product(*map(range, (*case.lengths.shape, heads))):
        count, length = int(counts[b, i]), int(case.lengths[b, i])
        positions = np.asarray(out.positions[b, i, h])
        np.testing.assert_array_equal(positions[count:], 0)
        if count == 0:
            assert float(out.mass[b, i, h]) == 0
            np.testing.assert_array_equal(out.kept[b, i, h], 0)
            continue
        scores, p, values = probabilities(case, b, i, h)
        sinks = min(sink_keys, count)
        recent = min(recent_keys, count - sinks)
        scores[:sinks] = scores[length - recent :] = np.inf
        kept = positions[:count].astype(int)
        assert kept.tolist() == np.sort(np.argsort(-scores, kind="stable")[:count]).tolist()
        np.testing.assert_allclose(out.mass[b, i, h], p[kept].sum(), atol=2e-6)
        np.testing.assert_allclose(out.kept[b, i, h], p[kept] @ values[kept], atol=5e-6)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES)
def test_matches_the_oracle(capture, make_case, group, head_dim, dtype):
    case = make_case(group=group, head_dim=head_dim, dtype=dtype)
    counts = counts_of(case.lengths)
    check(case, counts, capture(*case.args, counts))


@pytest.mark.parametrize("unallocated", ["past_end", "poison"])
@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES)
def test_capturing_changes_nothing(
    capture, bind, make_case, group, head_dim, dtype, unallocated
):
    """The output is the dense op's own, bit for bit, across programs and inside one."""
    case = make_case(group=group, head_dim=head_dim, dtype=dtype, unallocated=unallocated)
    counts = counts_of(case.lengths)
    dense = bind(paged_attention, "xla")(*case.args)
    out = capture(*case.args, counts, dense_implementation="xla").out
    np.testing.assert_array_equal(out, dense)

    @jax.jit
    def both(*args):
        captured = capture_attention_xla(*args, capacity=CAPACITY, dense_implementation="xla")
        dense = paged_attention(*args[:5], implementation="xla")
        # Something that goes on, as it does in a model, and may be fused with.
        return captured.out, dense, captured.out * 2 - captured.kept.astype(dense.dtype)

    one, other, _ = both(*case.args, counts)
    np.testing.assert_array_equal(one, dense)
    np.testing.assert_array_equal(other, dense)


def test_nothing_beyond_a_row_is_seen(capture, make_case):
    """Pages past the longest row may hold NaN, infinity or anything else."""
    case = make_case([[5, 4], [0, 0], [20, 1], [0, 9]], unallocated="poison")
    counts = counts_of(case.lengths)
    out = capture(*case.args, counts)
    for junk in (np.inf, -np.inf, 3e38):
        pools = [jnp.where(jnp.isnan(pool), junk, pool) for pool in case.args[1:3]]
        again = capture(case.q, *pools, *case.args[3:], counts)
        jax.tree.map(np.testing.assert_array_equal, again, out)
    assert np.isfinite(np.asarray(out.kept)).all()


@pytest.mark.parametrize(
    ("sinks", "recent"), [(1, 0), (0, 2), (2, 3), (3, 9), (20, 1)], ids=str
)
def test_sinks_and_recent_keys_count_inside_k(capture, make_case, sinks, recent):
    case = make_case([[0, 1], [2, 5], [21, 9], [39, 40]])
    counts = counts_of(case.lengths)
    out = capture(*case.args, counts, sink_keys=sinks, recent_keys=recent)
    check(case, counts, out, sinks, recent)
    newest = np.asarray(out.positions[3, 1, :, :10])  # k = 10 of 40
    assert (newest[:, : min(sinks, 10)] == np.arange(min(sinks, 10))).all()
    kept = min(recent, 10 - min(sinks, 10))
    assert (newest[:, 10 - kept :] == np.arange(40 - kept, 40)).all()


def test_retention_1_keeps_the_whole_output(capture, make_case):
    case = make_case([[1, 2], [5, 3], [12, 11], [8, 9]])
    out = capture(*case.args, case.lengths)
    np.testing.assert_allclose(out.mass, 1, atol=1e-6)
    np.testing.assert_allclose(out.kept, out.out, atol=2e-6)


def test_nothing_is_kept_at_count_0(capture, make_case):
    """A row that is not captured is attended to all the same."""
    case = make_case()
    kept = capture(*case.args, counts_of(case.lengths))
    nothing = capture(*case.args, jnp.zeros_like(case.lengths))
    np.testing.assert_array_equal(nothing.out, kept.out)
    for array in nothing[1:]:
        np.testing.assert_array_equal(array, jnp.zeros_like(array))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_is_a_row_in_a_batch(capture, paged_case, dtype):
    """Large enough that XLA would sum the batch by another code path than the row."""
    case = paged_case([300, 200, 120], heads=8, kv_heads=8, head_dim=64, dtype=dtype)
    counts = jnp.int32([[9], [12], [3]])
    batch = capture(*case.args, counts)
    again = capture(*case.args, counts)
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    for b in range(3):
        row = slice(b, b + 1)
        alone = capture(
            case.q[row], case.k_pool, case.v_pool, case.page_table[row], case.lengths[row],
            counts[row],
        )  # fmt: skip
        for name in ("positions", "mass", "kept"):
            np.testing.assert_array_equal(
                getattr(alone, name)[0], getattr(batch, name)[b], f"{name} of row {b}"
            )


def test_positions_can_be_uint32(capture, make_case):
    case = make_case()
    counts = counts_of(case.lengths)
    out = capture(*case.args, counts, index_dtype=jnp.uint32)
    assert out.positions.dtype == jnp.uint32
    check(case, counts, out)


def test_selection_is_by_float32_scores(capture, make_case):
    """Keys far below the best have probability 0; the best of them are still kept."""
    case = make_case([[6, 6]] * 4, group=2)
    keys = np.asarray(case.k_pool).copy()
    for page in np.asarray(case.page_table)[:, 0]:
        keys[page, :, :6] = 0
        keys[page, :, :6, 0] = [-300.0, -200.0, 400.0, -250.0, -220.0, -500.0]
    q = jnp.zeros_like(case.q).at[..., 0].set(8.0)
    out = capture(q, jnp.asarray(keys), *case.args[2:], jnp.full((4, 2), 4, jnp.int32))
    assert (np.asarray(out.mass) == 1).all()
    assert (np.asarray(out.positions)[..., :4] == [1, 2, 3, 4]).all()
