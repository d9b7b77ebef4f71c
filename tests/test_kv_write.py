"""Every implementation of `write_kv`: exact bytes in the right places and nowhere else."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import write_kv

PAGES, KV_HEADS, SIZE, DIM = 7, 2, 4, 16
POOL = (PAGES, KV_HEADS, SIZE, DIM)
PAST = PAGES  # what an unused entry of a page table holds
POISON = 777.0


@pytest.fixture(params=sorted(write_kv.implementations))
def implementation(request) -> str:
    return request.param


@pytest.fixture
def write(implementation, bind):
    return bind(write_kv, implementation)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `write_kv` as NumPy arrays."""

    k_pool: np.ndarray
    v_pool: np.ndarray
    k: np.ndarray  # [B, n, kv_heads, head_dim]
    v: np.ndarray
    page_table: np.ndarray  # [B, max_pages]
    positions: np.ndarray  # [B, n]
    live: np.ndarray  # [B, n]

    @property
    def args(self) -> tuple[jax.Array, ...]:
        fields = dataclasses.fields(self)
        return tuple(jnp.asarray(getattr(self, field.name)) for field in fields)


def make(page_table, positions, live=None, *, dtype="float32", pool_dtype=None, seed=0) -> Case:
    rng = np.random.default_rng(seed)
    positions = np.asarray(positions, np.int32)
    shape = (*positions.shape, KV_HEADS, DIM)
    k, v = (np.array(jnp.asarray(rng.standard_normal(shape), dtype)) for _ in range(2))
    return Case(
        k_pool=np.asarray(jnp.full(POOL, POISON, pool_dtype or dtype)),
        v_pool=np.asarray(jnp.full(POOL, POISON + 1, pool_dtype or dtype)),
        k=k,
        v=v,
        page_table=np.asarray(page_table, np.int32),
        positions=positions,
        live=np.ones(positions.shape, bool) if live is None else np.asarray(live, bool),
    )


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The two pools after the write, row by row."""
    pools = case.k_pool.copy(), case.v_pool.copy()
    for pool, rows in zip(pools, (case.k, case.v), strict=True):
        for (b, i), position in np.ndenumerate(case.positions):
            slot = position // SIZE
            if not case.live[b, i] or not 0 <= slot < case.page_table.shape[1]:
                continue
            page = case.page_table[b, slot]
            if 0 <= page < PAGES:
                pool[page, :, position % SIZE] = rows[b, i].astype(pool.dtype)
    return pools


def check(case: Case, out) -> None:
    for got, want in zip(out, expected(case), strict=True):
        got = np.asarray(got)
        assert got.dtype == want.dtype
        # As bytes: -0 is not 0, and no NaN equals itself.
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


TABLE = [[5, 2, PAST], [0, 6, 3]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_land_in_their_pages(write, dtype):
    case = make(TABLE, [[2, 3, 4, 5], [0, 7, 8, 11]], dtype=dtype)
    check(case, write(*case.args))
    assert (expected(case)[0] != case.k_pool).any(axis=(1, 2, 3)).sum() == 5


@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float32"])
def test_rows_are_rounded_to_the_dtype_of_the_pool(write, pool_dtype):
    dtype = {"bfloat16": "float32", "float32": "bfloat16"}[pool_dtype]
    case = make(TABLE, [[2], [9]], dtype=dtype, pool_dtype=pool_dtype)
    check(case, write(*case.args))


def test_special_values_are_stored_as_they_are(write):
    case = make(TABLE, [[0], [1]])
    case.k[0, 0, 0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    case.v[1, 0, 1, :4] = [np.float32(1e-45), -0.0, np.nan, 3e38]
    check(case, write(*case.args))


def test_dead_rows_write_nothing(write):
    case = make(TABLE, [[2, 3, 4], [0, 1, 2]], [[True, False, True], [False] * 3])
    case.k[1] = np.nan
    check(case, write(*case.args))


NOWHERE = {
    "past the table": (TABLE, 3 * SIZE),
    "far past the table": (TABLE, np.iinfo(np.int32).max),
    "negative position": (TABLE, -1),
    "far negative position": (TABLE, np.iinfo(np.int32).min),
    "unallocated page": (TABLE, 2 * SIZE + 1),
    "id far past the pool": ([[5, 2, np.iinfo(np.int32).max], [0, 6, 3]], 2 * SIZE + 1),
    "negative id": ([[5, 2, -1], [0, 6, 3]], 2 * SIZE + 1),
    "far negative id": ([[5, 2, -PAGES - 1], [0, 6, 3]], 2 * SIZE + 1),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_a_row_without_a_page_writes_nothing(write, name):
    table, position = NOWHERE[name]
    case = make(table, [[position], [4]])
    out = write(*case.args)
    check(case, out)
    # In words: of page 0, the last page and every other, only the one of request 1 changed.
    for pool, poison in zip(out, (POISON, POISON + 1), strict=True):
        changed = (np.asarray(pool) != poison).any(axis=(1, 2, 3))
        np.testing.assert_array_equal(np.flatnonzero(changed), [6])


def test_all_rows_dead_leaves_the_pools_alone(write):
    case = make(TABLE, np.zeros((2, 3)), np.zeros((2, 3)))
    out = write(*case.args)
    for got, before in zip(out, (case.k_pool, case.v_pool), strict=True):
        np.testing.assert_array_equal(np.asarray(got), before)


def test_a_row_alone_equals_itself_in_a_batch(write):
    case = make(TABLE, [[2, 3, 4, 5], [0, 7, 8, 11]])
    pools = jnp.asarray(case.k_pool), jnp.asarray(case.v_pool)
    for b, i in np.ndindex(case.positions.shape):
        row = slice(b, b + 1), slice(i, i + 1)
        one = dataclasses.replace(
            case,
            k=case.k[row],
            v=case.v[row],
            page_table=case.page_table[row[0]],
            positions=case.positions[row],
            live=case.live[row],
        )
        pools = write(*pools, *one.args[2:])
    check(case, pools)


def test_more_rows_than_a_block_and_heads_of_24():
    """Only the kernel cuts rows in blocks, and pads heads to a power of two."""
    rng = np.random.default_rng(3)
    k, v = (jnp.asarray(rng.standard_normal((3, 15, 2, 24)), "bfloat16") for _ in range(2))
    pool = jnp.full((16, 2, SIZE, 24), POISON, "bfloat16")
    table = jnp.asarray(rng.permutation(16)[:12].reshape(3, 4), jnp.int32)
    positions = jnp.asarray(rng.permuted(np.tile(np.arange(16), (3, 1)), axis=1)[:, :15])
    args = pool, pool + 8, k, v, table, positions.astype(jnp.int32), positions != 5
    outs = [write_kv(*args, implementation=name) for name in ("pallas", "xla")]
    for got, want, before in zip(*outs, (pool, pool + 8), strict=True):
        assert (want != before).any()
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_the_kernel_leaves_no_rows_to_the_reference():
    case = make(TABLE, np.zeros((2, 0)))
    with pytest.raises(NotImplementedError, match="write_kv of no rows"):
        write_kv(*case.args, implementation="pallas")


# In place --------------------------------------------------------------------------------

COPY = re.compile(r"\b(copy|convert|copy-start)\(")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_donated_pools_are_written_in_place(implementation, bind, dtype):
    if dtype == "bfloat16" and jax.default_backend() == "cpu" and jax.__version__ < "0.11":
        pytest.skip("XLA of JAX 0.10 widens every bfloat16 scatter on the CPU to float32")
    write = bind(write_kv, implementation, donate_argnums=(0, 1))
    temporaries = []
    for pages in (64, 4096):
        case = make(TABLE, [[2, 3, 4, 5], [0, 7, 8, 11]], dtype=dtype)
        shape = (pages, *POOL[1:])
        pool = jax.ShapeDtypeStruct(shape, case.k_pool.dtype)
        compiled = write.jitted.lower(pool, pool, *case.args[2:]).compile()
        text = ",".join(map(str, shape))
        lines = [line for line in compiled.as_text().splitlines() if text in line]
        assert lines
        assert [line for line in lines if COPY.search(line)] == []
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 2 * pool.size * pool.dtype.itemsize
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]


def test_donation_is_used_without_a_warning(implementation, bind):
    write = bind(write_kv, implementation, donate_argnums=(0, 1))
    case = make(TABLE, [[2], [9]])
    k_pool, v_pool, *rest = case.args
    out = write(k_pool, v_pool, *rest)
    check(case, out)
    assert k_pool.is_deleted()
    assert v_pool.is_deleted()


# The checker itself ----------------------------------------------------------------------


def test_the_checker_finds_wrong_writes(bind):
    write = bind(write_kv, "xla")
    case = make(TABLE, [[2, 3, 4, 5], [0, 7, 8, 11]], [[True] * 4, [True, False, True, True]])
    check(case, write(*case.args))

    def changed(**changes):
        return write(*dataclasses.replace(case, **changes).args)

    k_pool, v_pool = write(*case.args)
    swapped = case.page_table[::-1]
    wrong = {
        "nothing written": (case.k_pool, case.v_pool),
        "K and V swapped": (v_pool, k_pool),
        "V only": (case.k_pool, v_pool),
        "a dead row written": changed(live=np.ones_like(case.live)),
        "one row lost": changed(live=case.live & (case.positions != 8)),
        "a neighbour's pages": changed(page_table=swapped),
        "one position late": changed(positions=case.positions + 1),
        "heads reversed": changed(k=case.k[:, :, ::-1]),
        "one bit": (k_pool.at[0, 0, 0, 0].add(1e-6), v_pool),
        "last page touched": (k_pool.at[-1, 0, 0, 0].set(0.0), v_pool),
        "another dtype": (k_pool.astype(jnp.bfloat16), v_pool),
    }
    assert [name for name, out in wrong.items() if _passes(case, out)] == []


def _passes(case: Case, out) -> bool:
    try:
        check(case, out)
    except AssertionError:
        return False
    return True
