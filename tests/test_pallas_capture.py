"""The kernels of capturing attention, with the cuts that only large shapes would choose.

`test_sparse_capture` holds every implementation to the contract.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels.capture_attention import capture_attention
from sparse_loop_jax.kernels.capture_attention.pallas import (
    capture_attention_pallas,
    capture_into_pallas,
)
from sparse_loop_jax.kernels.capture_attention.xla import row_scores, store_rows
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.paged_attention.pallas import scored_attention
from sparse_loop_jax.kernels.paged_attention.pallas_split import SplitConfig
from sparse_loop_jax.kernels.sparse_attention.cut import GatherConfig

LENGTHS = [[0, 1, 2], [0, 41, 42], [97, 98, 99]]
COUNTS = [[0, 1, 1], [0, 17, 42], [40, 16, 50]]
CAPACITY = 50
CUTS = {
    "one piece": (1, 16, "float32", GatherConfig(block_keys=16)),
    "pieces of groups": (4, 64, "bfloat16", GatherConfig(block_keys=16, splits=3)),
}


def make_case(paged_case, group=1, head_dim=16, dtype="float32"):
    return paged_case(
        LENGTHS, heads=2 * group, kv_heads=2, head_dim=head_dim, page_size=8, dtype=dtype,
        unallocated="poison",
    )  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_captures_the_same(paged_case, name):
    group, head_dim, dtype, config = CUTS[name]
    case = make_case(paged_case, group, head_dim, dtype)
    counts = jnp.asarray(COUNTS, jnp.int32)
    options = {"capacity": CAPACITY, "dense_implementation": "xla"}

    @jax.jit
    def capture(*args):
        return capture_attention_pallas(*args, config=config, **options)

    want = capture_attention(*case.args, counts, implementation="xla", **options)

    def differs(got, expected) -> set[str]:
        tolerance = {"out": 0, "positions": 0, "mass": 2e-6, "kept": 5e-6}
        return {
            field
            for field, most in tolerance.items()
            if not np.allclose(
                np.asarray(getattr(got, field), np.float32),
                np.asarray(getattr(expected, field), np.float32),
                rtol=0,
                atol=most,
            )
        }

    out = capture(*case.args, counts)
    assert differs(out, want) == set()
    for dead in ((0, 0), (1, 0)):
        assert not any(np.asarray(x[dead], np.float32).any() for x in out)
    *rest, table, lengths = case.args
    most = jnp.minimum(lengths, CAPACITY)  # what asks for more gets
    assert differs(capture(*case.args, counts + 100), capture(*case.args, most)) == set()
    swapped = table.at[2, jnp.array([0, 1])].set(table[2, jnp.array([1, 0])])
    shorter = jnp.where(lengths > 42, lengths - 1, lengths)
    wrong = {
        "one key too few": (capture(*case.args, counts - 1), {"positions", "mass", "kept"}),
        "pages swapped": (capture(*rest, swapped, lengths, counts), {"positions"}),
        "length -1": (capture(*rest, table, shorter, counts), {"out", "mass", "kept"}),
    }
    for key, (answer, fields) in wrong.items():
        assert fields <= differs(answer, want), key


@pytest.mark.parametrize("name", CUTS)
def test_references_go_into_their_slots(paged_case, name):
    group, head_dim, dtype, config = CUTS[name]
    case = make_case(paged_case, group, head_dim, dtype)
    counts = jnp.asarray(COUNTS, jnp.int32)
    slots = jnp.asarray([[9, 3, 8], [0, 9, 7], [10, 1, 2]], jnp.int32)  # of nine
    heads = case.q.shape[2]
    poison = (
        jnp.full((9, heads, CAPACITY), 0xDEAD, jnp.uint16),
        jnp.full((9, heads), jnp.nan, jnp.float32),
        jnp.full((9, heads, head_dim), jnp.nan, jnp.float32),
    )
    options = {"config": config, "dense_implementation": "xla"}
    capture = functools.partial(capture_attention_pallas, *case.args, counts)
    want = capture(capacity=CAPACITY, **options)
    got = functools.partial(capture_into_pallas, *case.args, counts, slots, *poison)(**options)
    np.testing.assert_array_equal(got.out, want.out)
    for stored, junk, each in zip(
        got[1:], poison, store_rows(want, slots, *poison)[1:], strict=True
    ):
        np.testing.assert_array_equal(stored, each)
        np.testing.assert_array_equal(stored[4:7], junk[4:7])  # of no row
    base = want.out[2, 2].astype(jnp.float32) - want.kept[2, 2]
    np.testing.assert_array_equal(got.base[2], base)
    np.testing.assert_array_equal(got.positions[2], want.positions[2, 2])
    np.testing.assert_array_equal(got.mass[2], want.mass[2, 2])


def test_the_dense_pass_leaves_its_scores(paged_case):
    case = make_case(paged_case, group=2)
    q, k_pool, _, table, lengths = case.args
    want = np.asarray(row_scores(q, k_pool, table, lengths), np.float64) * np.log2(np.e)
    live = np.asarray(lengths) > 0
    for splits in (1, 4):
        config = SplitConfig(
            block_rows=8, block_keys=16, splits=splits, min_keys=16, num_warps=1, num_stages=1
        )
        got = scored_attention(*case.args, config=config)
        seen = np.broadcast_to(
            np.arange(want.shape[3]) < np.asarray(lengths)[..., None, None], want.shape
        )
        np.testing.assert_allclose(np.asarray(got.scores)[seen], want[seen], atol=5e-6)
        top = want[live].max(axis=-1)
        np.testing.assert_allclose(np.asarray(got.top)[live], top, atol=5e-6)
        total = np.exp2(want[live] - top[..., None]).sum(axis=-1)
        np.testing.assert_allclose(np.asarray(got.total)[live], total, rtol=5e-6)
        dense = paged_attention(*case.args, implementation="xla")
        np.testing.assert_allclose(got.out, dense, atol=2e-6)


def test_the_output_is_that_of_the_dense_op_asked_for(paged_case):
    case = make_case(paged_case)
    counts = jnp.asarray(COUNTS, jnp.int32)

    def capture(*args, **options):
        config = CUTS["one piece"][3]
        return capture_attention_pallas(*args, capacity=CAPACITY, config=config, **options)

    for name in ("pallas", None):
        out = capture(*case.args, counts, dense_implementation=name).out
        np.testing.assert_array_equal(out, paged_attention(*case.args, implementation=name))
    with pytest.raises(ValueError, match="of paged_attention's, pallas, xla: got 'cuda'"):
        capture(*case.args, counts, dense_implementation="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"head_dim": 24}, "head_dim must be"), ({"page_size": 12}, "page_size must be")],
)
def test_what_the_kernels_do_not_serve(paged_case, options, message):
    case = paged_case([5], **options)
    counts = jnp.ones((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        capture_attention(*case.args, counts, capacity=1, implementation="pallas")
