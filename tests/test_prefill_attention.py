"""Every implementation of `prefill_attention` against NumPy, and the kernel of Mosaic."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import pallas_mosaic, pallas_triton, prefill_attention
from sparse_loop_jax.kernels.prefill_attention import mosaic

# The interpreter of Mosaic multiplies with NumPy, also what is made to be infinite or NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

PAGE = 16
ROWS = mosaic.TILE
# Float32 sums, and one rounding of the output and one of the softmax weights.
TOLERANCE = {"float32": (2e-6, 2e-6), "float16": (5e-4, 2**-9), "bfloat16": (4e-3, 2**-7)}
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__[:2] < pallas_mosaic.OLDEST_JAX, reason="JAX is too old for Mosaic"
)


# The interpreter of Mosaic runs warpgroups as threads that wait for each other, in a pool of as
# many threads as there are processors: with one they wait for ever. So it has a process of its
# own, with a pool that is large enough.
OWN_PROCESS = "SPARSE_LOOP_INTERPRETS_MOSAIC"


@pytest.fixture
def interpreter():
    """For tests that run the kernel of Mosaic."""
    if jax.default_backend() != "gpu" and OWN_PROCESS not in os.environ:
        pytest.skip("in test_mosaic_in_a_process_of_its_own")


@needs_mosaic
@pytest.mark.skipif(OWN_PROCESS in os.environ, reason="this is that process")
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it is not interpreted here")
def test_mosaic_in_a_process_of_its_own():
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "mosaic or race"],
        env=kept | {OWN_PROCESS: "1", "NPROC": "16"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 25


@pytest.fixture(params=sorted(prefill_attention.implementations))
def attend(request, bind):
    if request.param == "mosaic":
        request.getfixturevalue("interpreter")
    return bind(prefill_attention, request.param)


def chunk(*starts: int, rows: int = ROWS, live: int | None = None) -> np.ndarray:
    """Lengths of the rows of a chunk that begins at each of `starts`; the first `live` live."""
    lengths = np.arange(1, rows + 1) + np.array(starts)[:, None]
    return np.where(np.arange(rows) < (rows if live is None else live), lengths, 0)


@pytest.fixture
def case_of(paged_case):
    """`paged_case` of shapes that every implementation serves."""

    def make(lengths, **options):
        options = {"heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"} | options
        return paged_case(lengths, page_size=options.pop("page_size", PAGE), **options)

    return make


def check(case, out: jax.Array) -> None:
    """Fails unless `out` is the attention of `case`."""
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    atol, rtol = TOLERANCE[str(case.q.dtype)]
    out64 = np.asarray(out.astype(jnp.float32), np.float64)
    np.testing.assert_array_equal(out64[np.asarray(case.lengths) == 0], 0.0)
    np.testing.assert_allclose(out64, case.attention(), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 128, "kv_heads": 2},
        {"dtype": "float16", "page_size": 8},
        {"page_size": 64},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_matches_the_oracle(attend, case_of, options):
    # The first rows of a prompt, and a chunk after one block of keys and a bit.
    case = case_of(chunk(0, 150), **options)
    check(case, attend(*case.args))


def test_several_blocks_that_all_rows_see(attend, case_of):
    case = case_of(chunk(700))
    check(case, attend(*case.args))


@pytest.mark.parametrize("first", [127, 128, 129])
def test_blocks_that_all_rows_just_see_or_just_do_not(attend, case_of, first):
    case = case_of(chunk(first - 1))
    finite = jnp.nan_to_num(case.k_pool, nan=0.5), jnp.nan_to_num(case.v_pool, nan=0.5)
    case = case.replace(k_pool=finite[0], v_pool=finite[1])
    check(case, attend(*case.args))


@pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # of the interpreter
@pytest.mark.parametrize("keys", [slice(0, 128), slice(512, 640), slice(512, None)], ids=str)
def test_blocks_of_keys_whose_scores_are_minus_infinity_weigh_nothing(
    attend, case_of, keys, request
):
    """Scores may leave float32 below; a block of such keys may come first, or last."""
    if "pallas" in request.node.name and keys.start == 0:
        request.applymarker(pytest.mark.xfail(strict=True, reason="its first block is 0 / 0"))
    case = case_of(chunk(700))
    k, k_pool = np.array(case.k), np.array(case.k_pool)
    position = np.arange(int(case.lengths.max()))[keys]
    pages = np.asarray(case.page_table)[0, position // PAGE]
    for keys_of, index in ((k, (0, position)), (k_pool, (pages, slice(None), position % PAGE))):
        keys_of[..., 0] = 0
        keys_of[(*index, ..., 0)] = -3e38
    q = case.q.at[..., 0].set(1e4)
    case = case.replace(q=q, k=k, k_pool=jnp.asarray(k_pool))
    check(case, attend(*case.args))


def test_rows_see_no_more_than_the_table_holds(attend, case_of):
    case = case_of(chunk(0, 60), max_pages=12)  # 192 tokens
    beyond = case.replace(lengths=jnp.where(case.lengths > 180, 1000, case.lengths))
    held = case.replace(lengths=jnp.where(case.lengths > 180, 192, case.lengths))
    fill = {name: jnp.nan_to_num(getattr(case, name), nan=0.5) for name in ("k_pool", "v_pool")}
    out, want = (attend(*c.replace(**fill).args) for c in (beyond, held))
    np.testing.assert_array_equal(out, want)


def test_padding_and_whole_tiles_of_it_are_dead(attend, case_of):
    lengths = chunk(300, 0, rows=2 * ROWS, live=60)
    lengths[1] = chunk(0, rows=2 * ROWS, live=200)[0]
    case = case_of(lengths)
    case = case.replace(q=jnp.where(case.lengths[..., None, None] == 0, jnp.nan, case.q))
    out = attend(*case.args)
    check(case.replace(q=jnp.nan_to_num(case.q)), out)


def test_rows_need_not_be_in_order(attend, case_of):
    rng = np.random.default_rng(0)
    case = case_of(rng.integers(0, 400, (2, ROWS)))
    check(case, attend(*case.args))


# What must not be read -------------------------------------------------------------------


@pytest.mark.parametrize("junk", [-1, np.iinfo(np.int32).max])
def test_unused_entries_of_the_table_may_hold_anything(attend, case_of, junk):
    clean = case_of(chunk(5, 40))
    table = np.asarray(clean.page_table).copy()
    table[table == clean.k_pool.shape[0]] = junk
    out = attend(*clean.replace(page_table=jnp.asarray(table)).args)
    check(clean, out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pool", ["k_pool", "v_pool"])
def test_a_row_never_reads_what_only_its_neighbour_sees(attend, case_of, pool, value):
    clean = case_of(chunk(20, 7))
    position = 20 + 80  # what row 80 of request 0 sees first
    page = clean.page_table[0, position // PAGE]
    poisoned = getattr(clean, pool).at[page, :, position % PAGE].set(value)
    out = np.asarray(attend(*clean.replace(**{pool: poisoned}).args))
    expected = np.asarray(attend(*clean.args))
    np.testing.assert_array_equal(out[0, :80], expected[0, :80])
    np.testing.assert_array_equal(out[1], expected[1])
    for row in range(80, ROWS):
        assert not np.isfinite(out[0, row].astype(np.float32)).all(), row


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_all_rows_see_and_is_not_finite_is_not_hidden(attend, case_of, value):
    clean = case_of(chunk(200))
    poisoned = clean.v_pool.at[clean.page_table[0, 2], 0, 1, 3].set(value)
    out = np.asarray(attend(*clean.replace(v_pool=poisoned).args)).astype(np.float32)
    assert not np.isfinite(out[0, :, :, 3]).any()


def test_lengths_below_zero_are_dead(attend, case_of):
    case = case_of(chunk(0, 150))
    below = case.replace(lengths=case.lengths.at[0].set(-300))
    dead = case.replace(lengths=case.lengths.at[0].set(0))
    np.testing.assert_array_equal(attend(*below.args), attend(*dead.args))


# Independence ----------------------------------------------------------------------------


def test_a_request_alone_equals_itself_in_a_batch(attend, case_of):
    case = case_of(chunk(3, 150))
    together = np.asarray(attend(*case.args))
    for b in range(2):
        q, k, v, table, lengths = case.args
        alone = attend(q[b : b + 1], k, v, table[b : b + 1], lengths[b : b + 1])
        np.testing.assert_array_equal(np.asarray(alone)[0], together[b])


def test_a_wider_table_and_a_repeat_change_nothing(attend, case_of):
    case = case_of(chunk(3, 150))
    wide = case_of(chunk(3, 150), max_pages=3 * case.page_table.shape[1])
    out = np.asarray(attend(*case.args))
    np.testing.assert_array_equal(attend(*case.args), out)
    if attend.is_reference:  # a product of another width, in another order
        check(wide, attend(*wide.args))
    else:
        np.testing.assert_array_equal(attend(*wide.args), out)


# The checker itself ----------------------------------------------------------------------


def test_the_checker_finds_wrong_answers(attend, case_of):
    case = case_of(chunk(30, 150))
    fill = {name: jnp.nan_to_num(getattr(case, name), nan=0.5) for name in ("k_pool", "v_pool")}
    case = case.replace(**fill)
    right = attend(*case.args)
    check(case, right)
    table, lengths = case.page_table, case.lengths
    wrong = {
        "zeros": jnp.zeros_like(right),
        "heads swapped": right[:, :, ::-1],
        "K for V": attend(*case.replace(v_pool=case.k_pool).args),
        "a neighbour's page": attend(
            *case.replace(page_table=table.at[:, 0].set(table[::-1, 0])).args
        ),
        "one key too few": attend(*case.replace(lengths=lengths - 1).args),
        "one key too many": attend(*case.replace(lengths=lengths + 1).args),
        "one row one key too many": attend(*case.replace(lengths=lengths.at[0, 0].add(1)).args),
    }
    assert [name for name, out in wrong.items() if _passes(case, out)] == []


def _passes(case, out) -> bool:
    try:
        check(case, out)
    except AssertionError:
        return False
    return True


# The kernel of Mosaic --------------------------------------------------------------------


@needs_mosaic
@pytest.mark.parametrize("broken", [False, True])
def test_copies_do_not_race_with_readers(interpreter, case_of, monkeypatch, broken):
    callbacks = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    from sparse_loop_jax.kernels.prefill_attention import mosaic_attend

    watched = functools.partial(pallas_mosaic.interpreter, detect_races=True)
    monkeypatch.setattr(pallas_mosaic, "interpreter", watched)
    if broken:  # what is read and written in shared memory is never handed to the copies
        monkeypatch.setattr(mosaic_attend.gpu, "commit_smem", lambda: None)
    case = case_of(chunk(700), heads=1, max_pages=60 + broken)  # traced anew
    try:
        out = mosaic.prefill_attention_mosaic(*case.args)
        check(case, out)
        found = callbacks.get_races().races_found
    except jax.errors.JaxRuntimeError:  # what a race is in JAX 0.12
        found = True
    assert found is broken


@needs_mosaic
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, r"all bfloat16 or float16: \['float32'\]"),
        ({"head_dim": 32}, r"head_dim must be one of \(64, 128\), got 32"),
        ({"page_size": 4}, "page_size must be one of .*, got 4"),
        ({"page_size": 256}, "page_size must be one of .*, got 256"),
        ({"rows": 100}, "rows must be a multiple of 128, of one request at least: 1 x 100"),
    ],
    ids=str,
)
def test_mosaic_says_what_it_does_not_serve(case_of, options, message):
    rows = options.pop("rows", ROWS)
    case = case_of(chunk(0, rows=rows), **options)
    with pytest.raises(NotImplementedError, match=message):
        prefill_attention(*case.args, implementation="mosaic")


@needs_mosaic
def test_mosaic_refuses_shapes_that_do_not_fit(case_of):
    q, k, v, table, lengths = case_of(chunk(0, 150)).args
    wrong = {
        "q .* does not fit pools": [(q, k, v[:, :, :8], table, lengths)],
        "lengths must be": [(q, k, v, table, lengths[:1]), (q, k, v, table[:1], lengths)],
    }
    for message, cases in wrong.items():
        for args in cases:
            with pytest.raises(ValueError, match=message):
                prefill_attention(*args, implementation="mosaic")


@needs_mosaic
def test_mosaic_is_for_hopper(case_of, monkeypatch):
    monkeypatch.setattr(pallas_mosaic, "_capability", lambda: "10.0")
    with pytest.raises(NotImplementedError, match=r"for Hopper, compute capability 9: 10\.0"):
        prefill_attention(*case_of(chunk(0)).args, implementation="mosaic")


@needs_mosaic
@pytest.mark.parametrize(
    ("version", "broken"), [(12070, False), (12080, True), (12090, True), (13000, False)]
)
def test_mosaic_makes_way_where_the_compiler_is_at_fault(monkeypatch, version, broken):
    monkeypatch.setattr(pallas_mosaic, "_cuda_version", lambda: version)
    if broken:
        with pytest.raises(
            NotImplementedError, match=r"ptxas of CUDA 12\.[89] miscompiles .*: use CUDA 13"
        ):
            pallas_mosaic.require_hopper()
    else:
        pallas_mosaic.require_hopper()


def test_mosaic_needs_a_jax_that_knows_it(case_of, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(NotImplementedError, match=r"need JAX 0\.11"):
        prefill_attention(*case_of(chunk(0)).args, implementation="mosaic")


def test_dense_attention_is_no_place_for_mosaic():
    from sparse_loop_jax.kernels import paged_attention

    with pytest.raises(ValueError, match=r"one of paged_attention's, .*: got 'mosaic'"):
        paged_attention.get("mosaic")


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "kv_heads", "head_dim", "page_size", "pages"),
    [(2048, 16, 128, 16, 8192), (128, 4, 64, 8, 64), (256, 16, 128, 64, 300_000)],
)
def test_mosaic_lowers(rows, kv_heads, head_dim, page_size, pages):
    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pool = array(pages, kv_heads, page_size, head_dim)
    text = pallas_triton.lower_for_cuda(
        lambda *args: mosaic.prefill_attention_mosaic(*args),
        array(2, rows, 16, head_dim),
        pool,
        pool,
        array(2, 512, dtype="int32"),
        array(2, rows, dtype="int32"),
    ).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
