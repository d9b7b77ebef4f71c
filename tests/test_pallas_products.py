"""The small products of a decode step: kernels against their references, on small shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels.matvec import gated_linear, linear, linear_add_norm
from sparse_loop_jax.kernels.matvec.pallas import choose_config
from sparse_loop_jax.kernels.matvec.pallas_kernels import MatvecConfig
from sparse_loop_jax.kernels.project_qkv import project_qkv
from sparse_loop_jax.kernels.rotate_write import rotate_write

INPUTS, OUTPUTS = 192, 96
EPS = 1e-6
# One rounding of an output of order 1 to bfloat16 may go the other way, and a branch rounds
# several times.
TOLERANCE = 2**-6


def normal(*shape, seed: int, dtype="bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def rows(*lead, seed=0, dtype="bfloat16") -> jax.Array:
    return normal(*lead, INPUTS, seed=seed, dtype=dtype)


def weight(outputs=OUTPUTS, dtype="bfloat16") -> jax.Array:
    return (normal(outputs, INPUTS, seed=1) * INPUTS**-0.5).astype(dtype)


def vectors(*lead) -> tuple[jax.Array, ...]:
    """A residual stream and two gains."""
    gains = (1 + normal(OUTPUTS, seed=seed) * 0.1 for seed in (3, 4))
    return normal(*lead, OUTPUTS, seed=2), *gains


def both(op, *args, **kwargs) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What "pallas" and "xla" give, as lists of float32 arrays."""
    out = []
    for name in ("pallas", "xla"):
        result = op(*args, implementation=name, **kwargs)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {args[0].dtype}
        out.append([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(result)])
    return out[0], out[1]


def check(got, want) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE)


CONFIG = MatvecConfig(block_out=32, block_in=32, splits=2, num_warps=1, num_stages=2)


@pytest.mark.parametrize("lead", [(1,), (3, 1), (2, 5), (11, 3)], ids=str)
def test_products_match_their_references(lead):
    check(*both(linear, rows(*lead), weight()))
    check(*both(gated_linear, rows(*lead), weight(2 * OUTPUTS)))
    check(*both(linear_add_norm, rows(*lead), weight(), *vectors(*lead), eps=EPS))


def test_float16_and_a_reduction_in_slices():
    args = (rows(2), weight(), *vectors(2))
    check(*both(linear_add_norm, *(arg.astype("float16") for arg in args), eps=EPS))
    got = linear_add_norm(*args, eps=EPS, implementation="pallas", config=CONFIG)
    want = linear_add_norm(*args, eps=EPS, implementation="xla")
    check([np.asarray(a, np.float32) for a in got], [np.asarray(a, np.float32) for a in want])


def test_a_row_has_the_same_bits_alone_and_among_others():
    x = rows(9)
    together = np.asarray(linear(x, weight(), implementation="pallas"), np.float32)
    for count in (1, 3):
        few = linear(x[:count], weight(), implementation="pallas")
        np.testing.assert_array_equal(np.asarray(few, np.float32), together[:count])


@pytest.mark.parametrize("op", [linear, gated_linear])
def test_the_checker_finds_wrong_products(op):
    x, w = rows(3), weight()
    got, want = both(op, x, w)
    check(got, want)
    wrong = {
        "zeros": np.zeros_like(got[0]),
        "a neighbour's row": got[0][::-1],
        "one output late": np.roll(got[0], 1, axis=-1),
        "one input lost": np.asarray(
            op(x.at[:, 0].set(0), w, implementation="xla"), np.float32
        ),
    }
    for answer in wrong.values():
        with pytest.raises(AssertionError):
            check([answer], want)


# What is not served ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (rows(129), weight(), "takes 1 to 128 rows, got 129"),
        (rows(1, dtype="float32"), weight(dtype="float32"), "of float32 rows"),
        (rows(1), weight(dtype="float16"), "bfloat16 rows and float16 weights"),
        (rows(1), weight(outputs=90), r"cannot cut a matrix \(90, 192\)"),
    ],
)
def test_other_arguments_are_left_to_the_next_implementation(x, w, message):
    with pytest.raises(NotImplementedError, match=message):
        linear(x, w, implementation="pallas")


def test_only_the_last_product_of_a_branch_is_cut_in_slices():
    with pytest.raises(ValueError, match="linear does not cut the reduction"):
        linear(rows(1), weight(), implementation="pallas", config=CONFIG)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_in", 48, "block_in must be a power of two, got 48"),
        ("splits", 0, "splits must be a power of two, got 0"),
        ("block_out", 8, "at least 16 outputs and inputs"),
        ("num_stages", 0, "num_stages must be positive, got 0"),
    ],
)
def test_a_configuration_checks_itself(name, value, message):
    fields = {"block_out": 16, "block_in": 16, "splits": 1, "num_warps": 1, "num_stages": 2}
    with pytest.raises(ValueError, match=message):
        MatvecConfig(**{**fields, name: value})


def test_chosen_blocks_cover_the_matrix():
    for outputs, inputs in ((2048, 2048), (6144, 2048), (2048, 5632), (96, 320), (48, 16)):
        for gated, splits in ((False, False), (True, False), (False, True)):
            config = choose_config(outputs, inputs, gated=gated, splits=splits)
            assert config is not None
            assert config.fits(outputs, inputs)
            assert config.splits == 1 or splits
    sliced = choose_config(2048, 2048, gated=False, splits=True)
    assert sliced is not None
    assert sliced.splits == 4
    assert choose_config(40, 2048, gated=False, splits=False) is None


def test_rows_up_to_32_share_a_configuration():
    def chosen(rows):
        return choose_config(2048, 2048, gated=True, splits=False, rows=rows)

    assert chosen(1) == chosen(32) != chosen(33) == chosen(128)


# Projection, rotation and write ----------------------------------------------------------

HEADS, KV_HEADS, DIM, PAGES, SIZE = 4, 2, 32, 7, 4
TABLE = jnp.array([[5, 2, PAGES], [0, 6, 3]], jnp.int32)


def project(positions, live, *, dim=DIM, dtype="bfloat16"):
    """Arguments of `project_qkv`; the pools hold 7 where nothing is written."""
    positions = jnp.asarray(positions, jnp.int32)
    half = np.random.default_rng(5).uniform(0, 6, (*positions.shape, dim // 2))
    angles = jnp.asarray(np.concatenate([half, half], axis=-1), jnp.float32)
    pool = jnp.full((PAGES, KV_HEADS, SIZE, dim), 7, dtype)
    return (
        rows(*positions.shape, dtype=dtype),
        weight((HEADS + 2 * KV_HEADS) * dim, dtype=dtype),
        jnp.cos(angles).astype(dtype),
        jnp.sin(angles).astype(dtype),
        pool,
        pool + 1,
        TABLE,
        positions,
        jnp.asarray(live),
    )


@pytest.mark.parametrize(
    ("positions", "live"),
    [
        ([[6], [11]], [[True], [True]]),
        # A dead row, a row before the table, one past it, one without a page.
        ([[2, 3, 4, 9], [0, -1, 7, 12]], [[True, False, True, True], [True] * 4]),
    ],
    ids=["decode", "rows"],
)
def test_projection_matches_its_reference(positions, live):
    args = project(positions, live)
    got, want = both(project_qkv, *args)
    check(got, want)
    for pool, before, after in zip(got[1:], (7, 8), want[1:], strict=True):
        untouched = after == before
        assert untouched.any()
        assert not untouched.all()
        np.testing.assert_array_equal(pool == before, untouched)


def test_the_checker_finds_wrong_projections():
    args = project([[6], [11]], [[True], [True]])
    got, want = both(project_qkv, *args)
    x, w, cos, sin, k_pool, v_pool, table, positions, live = args
    wrong = {
        "not rotated": (x, w, cos * 0 + 1, sin * 0, k_pool, v_pool, table, positions, live),
        "turned back": (x, w, cos, -sin, k_pool, v_pool, table, positions, live),
        "a neighbour's page": (*args[:6], table[::-1], positions, live),
        "one position late": (*args[:7], positions - 1, live),
        "nothing written": (*args[:8], ~live),
    }
    check(got, want)
    for arguments in wrong.values():
        answer, _ = both(project_qkv, *arguments)
        with pytest.raises(AssertionError):
            check(answer, want)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (project(np.zeros((3, 43)), np.ones((3, 43), bool)), "takes 1 to 128 rows: 129"),
        (project([[1], [1]], [[True], [True]], dtype="float32"), "of float32 rows"),
        (project([[1], [1]], [[True], [True]], dim=24), "cannot cut heads of 24"),
    ],
)
def test_other_projections_are_left_to_the_next_implementation(args, message):
    with pytest.raises(NotImplementedError, match=message):
        project_qkv(*args, implementation="pallas")


# Rotation and write, after a product of many rows ----------------------------------------


def rotation(positions, live, *, heads=HEADS, dim=DIM, dtype="bfloat16"):
    """Arguments of `rotate_write`, of the places and angles of `project`."""
    _, _, *rest = project(positions, live, dim=dim, dtype=dtype)
    width = (heads + 2 * KV_HEADS) * dim
    return normal(*np.shape(positions), width, seed=6, dtype=dtype), *rest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [4, 3])
def test_rotation_matches_its_reference(dtype, heads):
    """Dead rows, rows with no page; rows in more than one block, heads alone and together."""
    positions = [[2, 3, 4, 9, *range(12, 28)], [0, -1, 7, 12, 1, 2, 3, *[99] * 13]]
    live = np.ones((2, 20), bool)
    live[0, 1] = False
    args = rotation(positions, live, heads=heads, dtype=dtype)
    dead = jnp.asarray(~live)[..., None]
    args = jnp.where(dead, jnp.nan, args[0]).astype(dtype), *args[1:]
    got, want = both(rotate_write, *args)
    check(got, want)
    for pool, before, after in zip(got[1:], (7, 8), want[1:], strict=True):
        assert (after != before).any()
        np.testing.assert_array_equal(pool == before, after == before)
    # Values are copied as they are.
    np.testing.assert_array_equal(got[2], want[2])


def test_the_checker_finds_wrong_rotations():
    args = rotation([[6], [11]], [[True], [True]])
    _, want = both(rotate_write, *args)
    qkv, cos, sin, k_pool, v_pool, table, positions, live = args
    wrong = {
        "turned back": (qkv, cos, -sin, k_pool, v_pool, table, positions, live),
        "slots reversed": (
            qkv.reshape(2, 1, -1, DIM)[:, :, ::-1].reshape(qkv.shape),
            *args[1:],
        ),
        "a neighbour's page": (*args[:5], table[::-1], positions, live),
        "nothing written": (*args[:7], ~live),
    }
    for arguments in wrong.values():
        answer, _ = both(rotate_write, *arguments)
        with pytest.raises(AssertionError):
            check(answer, want)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (rotation(np.zeros((2, 0)), np.ones((2, 0), bool)), "rotate_write of no rows"),
        (rotation([[1], [1]], [[True], [True]], dim=24), "of heads of 24"),
    ],
)
def test_other_rotations_are_left_to_the_next_implementation(args, message):
    with pytest.raises(NotImplementedError, match=message):
        rotate_write(*args, implementation="pallas")
