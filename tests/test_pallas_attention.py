"""The kernels of paged attention, with the cuts that only large shapes would choose.

`test_paged_attention` holds every implementation to the contract. Here the pieces, blocks
and layouts of the Pallas kernels are set by hand, on small shapes, in the interpreter.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import paged_attention
from sparse_loop_jax.kernels.paged_attention.pallas import (
    choose_config,
    paged_attention_pallas,
)
from sparse_loop_jax.kernels.paged_attention.pallas_split import SplitConfig

LENGTHS = [0, 1, 2, 3, 15, 16, 17, 40, 33, 97]
# Rows of a verification: consecutive lengths, dead rows, lengths far apart.
ROWS = [[0, 1, 2], [15, 16, 17], [38, 39, 40], [0, 0, 33], [97, 5, 0], [0, 0, 0]]
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7}


SMALL = SplitConfig(
    block_rows=8, block_keys=16, splits=3, min_keys=16, num_warps=1, num_stages=2
)


def cut(**changes) -> SplitConfig:
    return dataclasses.replace(SMALL, **changes)


def attend(case, config: SplitConfig) -> np.ndarray:
    return np.asarray(paged_attention_pallas(*case.args, config=config), np.float32)


def reference(case) -> np.ndarray:
    """The shipped reference on the same numbers in float32."""
    q, k_pool, v_pool, *rest = case.args
    pools = (pool.astype(jnp.float32) for pool in (k_pool, v_pool))
    out = paged_attention(q.astype(jnp.float32), *pools, *rest, implementation="xla")
    return np.asarray(out)


def check(case, out: np.ndarray) -> None:
    tolerance = TOLERANCE[str(case.q.dtype)]
    np.testing.assert_allclose(out, reference(case), atol=tolerance, rtol=tolerance)


CUTS = {
    "more pieces than blocks": ("decode", 1, 16, "float32", cut(splits=16)),
    "uneven pieces of long heads": ("decode", 4, 128, "bfloat16", cut(block_keys=32)),
    "rows in pieces": ("rows", 1, 64, "bfloat16", cut(splits=4)),
    "rows and groups in one piece": ("rows", 4, 16, "float32", cut(block_rows=16, splits=1)),
    "rows in blocks": ("rows", 8, 16, "bfloat16", cut(splits=1)),
    "rows first": ("rows", 8, 16, "float32", cut(block_rows=64, splits=1)),
}


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_gives_the_attention(paged_case, name):
    lengths, group, head_dim, dtype, config = CUTS[name]
    case = paged_case(
        {"decode": LENGTHS, "rows": ROWS}[lengths],
        heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        page_size=8,
        dtype=dtype,
        unallocated="poison",
    )
    out = attend(case, config)
    check(case, out)
    np.testing.assert_array_equal(out[np.asarray(case.lengths) == 0], 0.0)
    np.testing.assert_array_equal(out, attend(case, config))


def test_two_grids_in_one_program(paged_case):
    first, second = paged_case(LENGTHS), paged_case(LENGTHS[:4], heads=8, seed=1)

    @jax.jit
    def both(a, b):
        return (
            paged_attention_pallas(*a, config=cut(splits=3)),
            paged_attention_pallas(*b, config=cut(splits=5)),
        )

    out = both(first.args, second.args)
    check(first, np.asarray(out[0]))
    check(second, np.asarray(out[1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_what_it_is_whatever_the_others_are(paged_case, dtype):
    # Keys that not all rows see are summed in other tiles: the same but for rounding.
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    case = paged_case([[36, 38, 39], [17, 31, 18]], dtype=dtype)
    together = attend(case, SMALL)
    for b, i in np.ndindex(2, 3):
        lengths = jnp.zeros_like(case.lengths).at[b, i].set(case.lengths[b, i])
        q = jnp.full_like(case.q, 7.0).at[b, i].set(case.q[b, i])
        out = attend(case.replace(q=q, lengths=lengths), SMALL)
        np.testing.assert_allclose(
            np.asarray(out[b, i], np.float32),
            np.asarray(together[b, i], np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_of_a_later_row_stays_out_of_every_piece(paged_case, value):
    clean = paged_case([[38, 39, 40]])
    page = clean.page_table[0, 39 // 16]
    poisoned = clean.replace(v_pool=clean.v_pool.at[page, :, 39 % 16].set(value))
    out = attend(poisoned, SMALL)
    np.testing.assert_array_equal(out[0, :2], attend(clean, SMALL)[0, :2])
    assert not np.isfinite(out[0, 2]).any()


def test_the_checker_finds_wrong_answers(paged_case):
    case = paged_case([[16], [17], [31], [40]], dtype="bfloat16")
    # Finite where no request looks, so that a read past a length is a plausible number.
    case = case.replace(
        k_pool=jnp.nan_to_num(case.k_pool, nan=0.5), v_pool=jnp.nan_to_num(case.v_pool, nan=0.5)
    )
    out = attend(case, SMALL)
    check(case, out)
    swapped = case.page_table.at[jnp.array([1, 2]), 0].set(
        case.page_table[jnp.array([2, 1]), 0]
    )
    wrong = {
        "zeros": np.zeros_like(out),
        "a neighbour's page": attend(case.replace(page_table=swapped), SMALL),
        "length -1": attend(case.replace(lengths=case.lengths - 1), SMALL),
        "length +1": attend(case.replace(lengths=case.lengths + 1), SMALL),
        "K for V": attend(case.replace(v_pool=case.k_pool), SMALL),
    }
    assert [name for name, answer in wrong.items() if _passes(case, answer)] == []


def _passes(case, answer) -> bool:
    try:
        check(case, answer)
    except AssertionError:
        return False
    return True


# Configurations --------------------------------------------------------------------------


def test_chosen_cuts_follow_the_shape():
    pool = (4096, 16, 16, 128)
    one = choose_config((1, 1, 16, 128), pool, 2048, jnp.bfloat16)
    many = choose_config((32, 1, 16, 128), pool, 128, jnp.bfloat16)
    rows = choose_config((1, 4, 16, 128), pool, 2048, jnp.bfloat16)
    chunk = choose_config((1, 2048, 16, 128), pool, 2048, jnp.bfloat16)
    assert one.splits > many.splits
    assert rows.splits == one.splits  # a verification cuts as decoding does
    assert (one.block_rows, chunk.block_rows, chunk.splits) == (8, 64, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_keys": 24}, "block_keys must be a power of two, got 24"),
        ({"num_warps": 0}, "num_warps must be a power of two, got 0"),
        ({"block_rows": 4}, "at least 8 rows and 16 keys"),
        ({"block_keys": 8}, "at least 8 rows and 16 keys"),
        ({"splits": 0}, "splits and num_stages must be positive"),
    ],
)
def test_a_configuration_checks_itself(changes, message):
    with pytest.raises(ValueError, match=message):
        cut(**changes)


def test_pieces_and_blocks_of_rows_exclude_each_other(paged_case):
    case = paged_case([[1] * 12])
    with pytest.raises(ValueError, match="cuts the context and the 24 queries"):
        paged_attention_pallas(*case.args, config=cut(splits=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 24}, "head_dim must be one of"),
        ({"page_size": 12}, "page_size must be a power of two, got 12"),
    ],
)
def test_what_the_kernels_do_not_serve(paged_case, options, message):
    case = paged_case([5], **options)
    with pytest.raises(NotImplementedError, match=message):
        paged_attention_pallas(*case.args)


def test_integers_are_not_served(paged_case):
    case = paged_case([5])
    case = case.replace(v_pool=jnp.zeros(case.v_pool.shape, jnp.int32))
    with pytest.raises(NotImplementedError, match="v_pool must be a float"):
        paged_attention_pallas(*case.args)
