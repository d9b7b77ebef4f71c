"""The Triton kernels and the door to them.

Without a GPU and jax-triton the kernels are skipped here and in the tests of their ops. They
run interpreted where Triton is installed: `TRITON_INTERPRET=1 pytest -k triton tests/...`.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.bench.attention_ops import Options
from sparse_loop_jax.kernels import pallas_triton, registry, triton_call
from sparse_loop_jax.kernels.capture_attention import capture_attention, capture_into
from sparse_loop_jax.kernels.select_keys import select_keys
from sparse_loop_jax.kernels.select_keys.layout import SelectConfig
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.cut import GatherConfig

# The door ------------------------------------------------------------------------------


@pytest.fixture
def door(monkeypatch):
    """The module as it is where nothing is interpreted and nothing was imported."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    triton_call._import.cache_clear()
    yield triton_call
    triton_call._import.cache_clear()


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def op_calls(batch=8, rows=1, heads=16, kv_heads=16, dim=128, capacity=820, dtype="bfloat16"):
    """A function and the shapes of its arguments, for each op."""
    q = array(batch, rows, heads, dim, dtype=dtype)
    pool = array(4096, kv_heads, 16, dim, dtype=dtype)
    table = array(batch, 512, dtype="int32")
    each = array(batch, rows, dtype="int32")
    head = array(batch, rows, heads, dtype="float32")
    positions = array(*head.shape, capacity, dtype="uint16")
    base = array(*q.shape, dtype="float32")
    scores = array(*each.shape, 8192, dtype="float32")
    options = {"implementation": "triton"}
    return {
        "select_keys": (
            functools.partial(select_keys, capacity=capacity, **options),
            (scores, each, each),
        ),
        "sparse_attention": (
            functools.partial(sparse_attention, **options),
            (q, pool, pool, table, positions, each, head, base),
        ),
        "capture_attention": (
            functools.partial(
                capture_attention, capacity=capacity, dense_implementation="pallas", **options
            ),
            (q, pool, pool, table, each, each),
        ),
    }


@pytest.mark.parametrize("op", op_calls())
def test_asked_for_by_name_it_says_what_is_missing(door, monkeypatch, op):
    function, args = op_calls()[op]
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="need a GPU, or TRITON_INTERPRET=1"):
            jax.eval_shape(function, *args)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    message = r"jax_triton cannot be imported .*: pip install -e '\.\[triton\]'"
    with door.compiling_for(90), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(function, *args)


@pytest.mark.parametrize("op", [*op_calls(), "sparse_attention, slots", "capture_into"])
def test_launches_give_the_shapes_of_the_reference(monkeypatch, op):
    """Without Triton: what is launched in pieces is asked for and put together alike."""
    for name in ("select_keys", "capture_attention", "sparse_attention"):
        kernels = f"sparse_loop_jax.kernels.{name}.triton_kernel"
        monkeypatch.setitem(sys.modules, kernels, mock.MagicMock())
    launched = []

    def call(kernel, *args, out_shape, name, **options):
        launched.append(name)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    monkeypatch.setattr(triton_call, "require", lambda: None)
    monkeypatch.setattr(triton_call, "call", call)
    calls = op_calls(batch=2, rows=3)
    each, stored = array(2, 3, dtype="int32"), calls["sparse_attention"][1][4:]
    positions, _, mass, base = (array(9, *x.shape[2:], dtype=x.dtype) for x in stored)
    if op == "capture_into":
        args = *calls["capture_attention"][1], each, positions, mass, base
        function = functools.partial(
            capture_into, dense_implementation="xla", implementation="triton"
        )
    elif op == "sparse_attention, slots":
        function, args = calls["sparse_attention"]
        args = *args[:4], positions, each, mass, base, each

        def function(*args, op=function, **options):
            return op(*args[:-1], rows=args[-1], **options)
    else:
        function, args = calls[op]
    got = jax.eval_shape(function, *args)
    assert launched
    assert got == jax.eval_shape(functools.partial(function, implementation="xla"), *args)


def test_interpreting_needs_triton_alone(door, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotImplementedError, match="triton cannot be imported"):
        door.require()
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    door.require()


def test_in_an_order_it_makes_way_for_the_next(door, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.setattr(registry, "PREFERENCE", {jax.default_backend(): ("triton", "xla")})
    one = jnp.ones((1,), jnp.int32)
    with registry.recording() as served:
        out = select_keys(jnp.ones((1, 3)), one, one, capacity=2)
    assert served == {"select_keys": "xla"}
    np.testing.assert_array_equal(out, [[0, 0]])


def test_the_order_of_gpus():
    """Measured kernels come before those that are not, and both before the reference."""
    assert registry.PREFERENCE["gpu"] == ("mosaic", "pallas", "triton", "xla")


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_an_import_leaves_the_cache_of_triton_alone(door, monkeypatch, tmp_path, before):
    name = f"sets_the_cache_{before is None}"
    (tmp_path / f"{name}.py").write_text('import os\nos.environ["TRITON_CACHE_DIR"] = ""\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    assert door._import(name).__name__ == name
    assert os.environ.get("TRITON_CACHE_DIR") == before


def test_versions_that_do_not_fit_are_a_reason_too(door, monkeypatch, tmp_path):
    (tmp_path / "does_not_fit.py").write_text("import os\nos.backend\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotImplementedError, match=r"does_not_fit .*AttributeError: .*backend"):
        door._import("does_not_fit")


@pytest.mark.parametrize("version", ["0.3", "0.4"])
def test_a_call_speaks_to_either_version(door, monkeypatch, version):
    calls = []

    def of_0_3(*args, out_shape, enable_fp_fusion, **options):
        calls.append((args, out_shape, enable_fp_fusion, options))

    def of_0_4(*args, out_type, backend_options, **options):
        calls.append((args, out_type, backend_options["enable_fp_fusion"], options))

    function = {"0.3": of_0_3, "0.4": of_0_4}[version]
    module = types.ModuleType("jax_triton")
    module.triton_call = function  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    out = array(3, dtype="float32")
    with door.compiling_for(90):
        door.call("kernel", 1, 2, grid=(4,), out_shape=out, num_warps=2, name="name", WIDTH=8)
    assert calls == [
        (
            (1, 2),
            out,
            True,
            {
                "kernel": "kernel",
                "grid": (4,),
                "num_warps": 2,
                "num_stages": 1,
                "compute_capability": 90,
                "name": "name",
                "WIDTH": 8,
            },
        )
    ]


def test_nothing_is_launched_for_no_rows(door):
    out = array(2, 0, dtype="uint16"), array(3, dtype="float32")
    zeros = door.call(None, grid=(2, 0), out_shape=out, num_warps=1, name="name")
    assert [x.dtype for x in zeros] == [jnp.uint16, jnp.float32]
    np.testing.assert_array_equal(zeros[1], np.zeros(3))


@pytest.mark.parametrize(
    ("name", "dense"),
    [(None, None), ("xla", "xla"), ("pallas", "pallas"), ("triton", None), ("none", "none")],
)
def test_a_bench_of_the_sparse_ops_leaves_dense_attention_to_its_order(name, dense):
    assert Options(name, repeats=2).dense == Options(dense, repeats=2)


# The kernels ---------------------------------------------------------------------------


@pytest.fixture
def launchable():
    try:
        triton_call.require()
    except NotImplementedError as error:
        pytest.skip(str(error))


def awkward_rows(span: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((11, span)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows[2] = 1.0
    rows[3] = np.where(rows[3] > 0, 0.0, -0.0)
    rows[4, ::3] = np.nan
    rows[5] = -np.nan
    rows[6, ::2] = np.inf
    rows[7, 1::2] = -np.inf
    rows[8] = -65504 - np.abs(rows[8])
    rows[9] *= 1e-42
    rows[10] = 2.0 ** np.linspace(-140, 120, span)
    return rows


@pytest.mark.usefixtures("launchable")
class TestKernels:
    @pytest.mark.parametrize(
        "config",
        [
            pytest.param(SelectConfig(num_warps=2, groups=8), id="all in registers"),
            pytest.param(SelectConfig(num_warps=1, groups=2), id="most read again"),
        ],
    )
    @pytest.mark.parametrize(("length", "count"), [(1300, 130), (1297, 700), (255, 255)])
    def test_every_layout_selects_exactly(self, config, length, count):
        rows = awkward_rows(1300)
        rows[:, length:] = np.inf
        args = [
            jnp.asarray(rows),
            *(jnp.full(len(rows), n, jnp.int32) for n in (length, count)),
        ]
        got = select_keys(*args, capacity=700, config=config, implementation="triton")
        want = select_keys(*args, capacity=700, implementation="xla")
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize(
        ("group", "head_dim", "dtype", "config"),
        [
            pytest.param(1, 16, "float32", GatherConfig(block_keys=16), id="one piece"),
            pytest.param(4, 64, "bfloat16", GatherConfig(block_keys=16, splits=3), id="pieces"),
            pytest.param(2, 32, "float16", GatherConfig(block_keys=16, splits=5), id="empty"),
        ],
    )
    def test_every_cut_captures_and_consumes(self, paged_case, group, head_dim, dtype, config):
        case = paged_case(
            [[0, 1, 2], [40, 41, 42], [97, 98, 99]], heads=2 * group, kv_heads=2, dtype=dtype,
            head_dim=head_dim, page_size=8, unallocated="poison",
        )  # fmt: skip
        counts = jnp.asarray([[0, 1, 2], [4, 17, 33], [40, 16, 39]], jnp.int32)
        capture = functools.partial(capture_attention, *case.args, counts, capacity=40)
        want = capture(implementation="xla", dense_implementation="xla")
        got = capture(implementation="triton", dense_implementation="xla", config=config)
        np.testing.assert_array_equal(got.positions, want.positions)
        np.testing.assert_allclose(got.mass, want.mass, atol=2e-6)
        np.testing.assert_allclose(got.kept, want.kept, atol=5e-6)

        live = jax.lax.broadcasted_iota(jnp.int32, want.positions.shape, 3)
        live = live < counts[..., None, None]
        positions = jnp.where(live, want.positions, jnp.uint16(65535))  # the rest is anything
        base = want.out.astype(jnp.float32) - want.kept
        base = base.at[0, 0].set(jnp.nan)  # of a dead row
        args = (
            jnp.roll(case.q, 1, axis=-1), *case.args[1:4], positions, counts, want.mass, base,
        )  # fmt: skip
        out = sparse_attention(*args, implementation="triton", config=config)
        # In float32, so that it is rounded once.
        wide = [x.astype(jnp.float32) if x.dtype == case.q.dtype else x for x in args]
        want = sparse_attention(*wide, implementation="xla")
        atol, rtol = (3e-6, 3e-6) if dtype == "float32" else (1e-4, 2**-8)
        np.testing.assert_allclose(out.astype(jnp.float32), want, atol=atol, rtol=rtol)
        np.testing.assert_array_equal(out[0, 0], jnp.zeros_like(out[0, 0]))


@pytest.mark.filterwarnings(f"ignore:{pallas_triton.DEPRECATION}:DeprecationWarning")
@pytest.mark.parametrize(
    ("op", "shape", "launches"),
    [
        ("select_keys", {}, 1),
        ("sparse_attention", {}, 2),
        ("sparse_attention", {"rows": 4, "kv_heads": 4, "dim": 64, "capacity": 1639}, 1),
        ("sparse_attention", {"dim": 32, "dtype": "float32"}, 2),
        ("capture_attention", {}, 3),
        ("capture_attention", {"rows": 4}, 2),
    ],
)
def test_calls_lower_for_hopper(op, shape, launches):
    """Compiled to PTX by the Triton at hand; needs jax-triton and a CUDA jaxlib, no GPU."""
    if triton_call.interpreting():
        pytest.skip("interpreted kernels are not compiled")
    function, args = op_calls(**shape)[op]
    with triton_call.compiling_for(90):
        try:
            triton_call.require()
        except NotImplementedError as error:
            pytest.skip(str(error))
        text = pallas_triton.lower_for_cuda(lambda *a: function(*a), *args).as_text()
    assert len(re.findall(r"custom_call @triton_kernel_call", text)) == launches
