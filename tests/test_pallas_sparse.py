"""The kernels of sparse attention, with the cuts that only large shapes would choose, and
the lowering of all kernels of sparse decoding for a CUDA device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import pallas_triton
from sparse_loop_jax.kernels.capture_attention.pallas import (
    capture_attention_pallas,
    capture_into_pallas,
)
from sparse_loop_jax.kernels.select_keys.pallas import select_keys_pallas
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.cut import GatherConfig, choose_config
from sparse_loop_jax.kernels.sparse_attention.pallas import sparse_attention_pallas

LENGTHS = [[0, 1, 2], [40, 41, 42], [97, 98, 99]]
COUNTS = [[0, 1, 2], [4, 17, 33], [40, 16, 39]]
CAPACITY = 40
NAMES = ("q", "k", "v", "table", "positions", "counts", "mass", "base")
CUTS = {
    "one piece": (1, 16, "float32", GatherConfig(block_keys=16)),
    "pieces of groups": (4, 64, "bfloat16", GatherConfig(block_keys=16, splits=3)),
    "more pieces than blocks": (2, 32, "float32", GatherConfig(block_keys=16, splits=5)),
}


def make_args(paged_case, group=1, head_dim=16, dtype="float32", index=jnp.uint16) -> dict:
    """Random references over a paged cache; where nothing is kept, entries are junk."""
    case = paged_case(
        LENGTHS, heads=2 * group, kv_heads=2, head_dim=head_dim, page_size=8, dtype=dtype,
        unallocated="poison",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lead = case.q.shape[:3]
    positions = np.full((*lead, CAPACITY), jnp.iinfo(index).max, np.int64)
    for b, i, h in np.ndindex(*lead):
        kept = rng.choice(max(LENGTHS[b][i], 1), COUNTS[b][i], replace=False)
        positions[b, i, h, : COUNTS[b][i]] = np.sort(kept)
    counts = jnp.asarray(COUNTS, jnp.int32)
    mass = rng.random(lead, np.float32)
    base = rng.standard_normal((*lead, head_dim)).astype(np.float32)
    mass[0, 0], base[0, 0] = np.nan, np.nan  # a dead row
    values = (
        *case.args[:4],
        jnp.asarray(positions, index),
        counts,
        *map(jnp.asarray, (mass, base)),
    )
    return dict(zip(NAMES, values, strict=True))


def error(out, want) -> float:
    gap = np.abs(np.asarray(out, np.float32) - np.asarray(want, np.float32))
    return float(np.inf if np.isnan(gap).any() else gap.max())


def reference(args: dict):
    args = {n: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for n, a in args.items()}
    return sparse_attention(*args.values(), implementation="xla")


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_gives_the_attention(paged_case, name):
    group, head_dim, dtype, config = CUTS[name]
    args = make_args(paged_case, group, head_dim, dtype)
    attend = jax.jit(functools.partial(sparse_attention_pallas, config=config))
    out, want = attend(*args.values()), reference(args)
    tolerance = 2e-6 if dtype == "float32" else 2**-6
    assert error(out, want) < tolerance
    np.testing.assert_array_equal(out[0, 0], jnp.zeros_like(out[0, 0]))
    np.testing.assert_array_equal(out, attend(*args.values()))
    wrong = {
        "mass left out": {"mass": jnp.ones_like(args["mass"])},
        "base left out": {"base": jnp.zeros_like(args["base"])},
        "one key too few": {"counts": jnp.maximum(args["counts"] - 1, 0)},
        "another row's positions": {"positions": jnp.roll(args["positions"], 1, axis=2)},
        "K for V": {"v": args["k"]},
    }
    missed = [
        key
        for key, changes in wrong.items()
        if error(attend(*(args | changes).values()), want) < tolerance
    ]
    assert missed == []


@pytest.mark.parametrize("name", ["one piece", "pieces of groups"])
def test_references_are_read_from_their_slots(paged_case, name):
    group, head_dim, dtype, config = CUTS[name]
    args = make_args(paged_case, group, head_dim, dtype)
    slots = np.array([[99, 3, 8], [0, 4, 7], [10, 1, 2]])  # a dead row's may be anything
    stored = {}
    for field in ("positions", "mass", "base"):
        value = np.asarray(args[field])
        array = np.zeros((11, *value.shape[2:]), value.dtype)
        array[slots % 94] = value
        stored[field] = jnp.asarray(array)
    rows = jnp.asarray(slots, jnp.int32)
    for attend in (
        functools.partial(sparse_attention_pallas, config=config),
        functools.partial(sparse_attention, implementation="xla"),
    ):
        out = attend(*(args | stored).values(), rows=rows)
        np.testing.assert_array_equal(out, attend(*args.values()))


def test_positions_can_be_uint32(paged_case):
    args = make_args(paged_case, index=jnp.uint32)
    out = sparse_attention_pallas(*args.values(), config=CUTS["one piece"][3])
    assert error(out, reference(args)) < 2e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 24}, "head_dim must be 16, 32, 64 or 128, got 24"),
        ({"head_dim": 256}, "got 256"),
        ({"dtype": "int32"}, "q must be a float of 2 or 4 bytes: int32"),
    ],
)
def test_what_the_kernels_do_not_serve(options, message):
    dim, dtype = options.get("head_dim", 16), options.get("dtype", "float32")
    args = [
        array(*x.shape, dtype=x.dtype) for x in sparse_args(1, 1, 2, 2, dim, 40, dtype=dtype)
    ]
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(sparse_attention_pallas, *args)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_keys": 24}, "block_keys must be a power of two of at least 16, got 24"),
        ({"block_keys": 8}, "got 8"),
        ({"splits": 0}, "splits, num_warps and num_stages must be positive"),
    ],
)
def test_a_configuration_checks_itself(fields, message):
    with pytest.raises(ValueError, match=message):
        GatherConfig(**fields)


def test_chosen_cuts_fill_the_device_once():
    assert choose_config(16, 3277).splits == 32  # one request of 16 heads
    assert choose_config(128, 820).splits == 4
    assert choose_config(512, 3277).splits == 1
    assert choose_config(16, 40).splits == 2  # nothing to cut


# Lowering ----------------------------------------------------------------------------


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def sparse_args(batch, rows, heads, kv_heads, dim, capacity, *, pages=4096, dtype="bfloat16"):
    pool = array(pages, kv_heads, 16, dim, dtype=dtype)
    return (
        array(batch, rows, heads, dim, dtype=dtype),
        pool,
        pool,
        array(batch, 512, dtype="int32"),
        array(batch, rows, heads, capacity, dtype="uint16"),
        array(batch, rows, dtype="int32"),
        array(batch, rows, heads, dtype="float32"),
        array(batch, rows, heads, dim, dtype="float32"),
    )


SPARSE = {
    "decode in pieces": (sparse_args(8, 1, 16, 16, 128, 820), 2),
    "verification": (sparse_args(8, 4, 16, 4, 64, 1639), 1),
    "float32": (sparse_args(2, 3, 8, 1, 32, 100, dtype="float32"), 2),
    "past 2^31 elements": (sparse_args(8, 1, 16, 16, 128, 820, pages=262_144), 2),
}


@pytest.mark.filterwarnings(f"ignore:{pallas_triton.DEPRECATION}:DeprecationWarning")
class TestLowering:
    @pytest.mark.parametrize("name", SPARSE)
    def test_sparse_attention(self, lowered, takes_64_bits, name):
        args, count = SPARSE[name]
        texts = lowered(sparse_attention_pallas, *args)
        assert len(texts) == count
        # Offsets into a pool take 64 bits where 32 are too few.
        assert takes_64_bits(texts[0]) is (name == "past 2^31 elements")

    @pytest.mark.parametrize("span", [16, 8192, 40_000, 65_536])
    def test_selection(self, lowered, span):
        lengths = array(4, dtype="int32")
        select = functools.partial(select_keys_pallas, capacity=span)
        args = (array(4, span, dtype="float32"), lengths, lengths)
        assert len(lowered(select, *args)) == 1

    @pytest.mark.parametrize(("rows", "launches"), [(1, 5), (4, 4)])
    def test_capture(self, lowered, rows, launches):
        q, k, v, table, *_ = sparse_args(8, rows, 16, 16, 128, 820)
        lengths = array(8, rows, dtype="int32")
        capture = functools.partial(
            capture_attention_pallas, capacity=820, dense_implementation="pallas"
        )
        assert len(lowered(capture, q, k, v, table, lengths, lengths)) == launches
        store = (
            array(20, 16, 820, dtype="uint16"),
            array(20, 16, dtype="float32"),
            array(20, 16, 128, dtype="float32"),
        )
        capture = functools.partial(capture_into_pallas, dense_implementation="pallas")
        args = (q, k, v, table, lengths, lengths, lengths, *store)
        assert len(lowered(capture, *args)) == launches
