"""Measured configurations: how they are found, and what is said of a broken file."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import tuning
from sparse_loop_jax.kernels.matvec import pallas as products
from sparse_loop_jax.kernels.paged_attention import pallas as paged
from sparse_loop_jax.kernels.project_qkv import pallas as projection
from sparse_loop_jax.kernels.select_keys import pallas as select
from sparse_loop_jax.kernels.sparse_attention import pallas as sparse

ENTRIES = {
    "paged_attention": {
        "key": {
            "batch": 8,
            "kv_heads": 2,
            "group": 1,
            "head_dim": 16,
            "length": 64,
            "dtype": "float32",
        },
        "config": {
            "block_keys": 16,
            "splits": 3,
            "min_keys": 16,
            "num_warps": 1,
            "num_stages": 2,
        },
    },
    "sparse_attention": {
        "key": {
            "batch": 8,
            "rows": 4,
            "heads": 2,
            "head_dim": 16,
            "length": 32,
            "dtype": "float32",
        },
        "config": {"block_keys": 16, "splits": 2, "num_warps": 2, "num_stages": 4},
    },
    "select_keys": {"key": {"rows": 16, "length": 64}, "config": {"num_warps": 2}},
    "project_qkv": {
        "key": {"rows": 32, "outputs": 192, "inputs": 64, "head_dim": 32, "dtype": "bfloat16"},
        "config": {"block_out": 16, "block_in": 32, "num_warps": 2, "num_stages": 3},
    },
    "gated_linear": {
        "key": {"rows": 32, "outputs": 64, "inputs": 128, "dtype": "bfloat16"},
        "config": {"block_out": 16, "block_in": 64, "num_warps": 2, "num_stages": 3},
    },
    "linear_add_norm": {
        "key": {"rows": 128, "outputs": 64, "inputs": 128, "dtype": "bfloat16"},
        "config": {
            "block_out": 16,
            "block_in": 32,
            "num_warps": 2,
            "num_stages": 3,
            "splits": 4,
        },
    },
}


def data(**changes) -> dict:
    """What a file holds."""
    ops = {op: [entry] for op, entry in ENTRIES.items()}
    return {"device": "Test 1", "made": {}, "ops": ops} | changes


@pytest.fixture
def write(tmp_path):
    """A function from what a file holds to the file."""

    def write(content) -> object:
        path = tmp_path / "test_1.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


PRODUCTS = ("project_qkv", "gated_linear", "linear_add_norm")


def product_config(op: str, key: dict):
    """The configuration that a product finds for a matrix and a number of rows."""
    shape, rows, dtype = (key["outputs"], key["inputs"]), key["rows"], key["dtype"]
    if op == "project_qkv":
        return projection.find_config(shape, key["head_dim"], rows, dtype)
    options = {"gated": op == "gated_linear", "splits": op == "linear_add_norm"}
    return products.find_config(op, *shape, rows, dtype, **options)


def used(monkeypatch, op: str, key: dict):
    """The configuration that an op runs with for arguments of a key's shapes."""
    if op in PRODUCTS:
        return product_config(op, key)
    seen = []
    module = {"paged_attention": paged, "sparse_attention": sparse, "select_keys": select}[op]

    def run(first, *rest, config, **options):
        seen.append(config)
        shape = first.shape
        if op == "select_keys":
            shape = (shape[0], options["capacity"])
        return jnp.zeros(shape, first.dtype)

    def arrays(*shapes):
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]

    monkeypatch.setattr(module, "_run", run)
    ints, floats = jnp.int32, jnp.float32
    if op == "select_keys":
        rows, length = key["rows"], key["length"]
        args = arrays(((rows, length), floats), ((rows,), ints), ((rows,), ints))
        index = jnp.uint16 if length <= 1 << 16 else jnp.uint32
        call = functools.partial(select.select_keys_pallas, capacity=1, index_dtype=index)
    else:
        batch, rows, dim, dtype = (
            key["batch"],
            key.get("rows", 1),
            key["head_dim"],
            key["dtype"],
        )
        kv_heads = key.get("kv_heads", key.get("heads"))
        heads = key.get("heads", kv_heads * key.get("group", 1))
        q, pool = (batch, rows, heads, dim), (1, kv_heads, 1, dim)
        args = [(q, dtype), (pool, dtype), (pool, dtype)]
        if op == "paged_attention":
            args += [((batch, key["length"]), ints), ((batch, rows), ints)]
            call = paged.paged_attention_pallas
        else:
            kept = (*q[:3], key["length"])
            args += [((batch, 1), ints), (kept, jnp.uint16), ((batch, rows), ints)]
            args += [(q[:3], floats), (q, floats)]
            call = sparse.sparse_attention_pallas
        args = arrays(*args)
    jax.eval_shape(lambda *a: call(*a), *args)  # a new function, which is traced anew
    return seen[-1]


def fields(config, names) -> dict:
    return {name: getattr(config, name) for name in names}


def check_entry(monkeypatch, table: tuning.Table, op: str, key: tuning.Key) -> None:
    """An entry is what its op runs with; making the configuration validates it."""
    with tuning.using(table):
        config = used(monkeypatch, op, tuning.describe(op, key))
    assert fields(config, tuning.OPS[op].fields) == table.entries[op][key]


@pytest.mark.parametrize("op", tuning.OPS)
def test_an_entry_is_what_the_op_runs_with(op, write, monkeypatch):
    table = tuning.read_table(write(data()))
    (key,) = table.entries[op]
    check_entry(monkeypatch, table, op, key)
    described = ENTRIES[op]["key"]
    with tuning.using(None):
        computed = used(monkeypatch, op, described)
    assert fields(computed, tuning.OPS[op].fields) != ENTRIES[op]["config"]
    # Sizes are bucketed upwards; other heads or too long a context were not measured.
    with tuning.using(table):
        name = "batch" if "batch" in described else "rows"
        fewer = used(monkeypatch, op, described | {name: described[name] - 1})
        size = "inputs" if op in PRODUCTS else "length"
        longer = used(monkeypatch, op, described | {size: 4 * described[size]})
    assert fields(fewer, tuning.OPS[op].fields) == ENTRIES[op]["config"]
    assert fields(longer, tuning.OPS[op].fields) != ENTRIES[op]["config"]


def test_every_shipped_entry_is_found_and_valid(monkeypatch):
    for file in tuning.folder().iterdir():
        if not file.name.endswith(".json"):
            continue
        table = tuning.read_table(file)
        assert file.name == tuning.file_name(table.device)
        assert tuning.device_table(table.device) == table
        for op, entries in table.entries.items():
            assert entries
            for key in entries:
                check_entry(monkeypatch, table, op, key)


def test_twice_the_length_takes_the_entry_where_it_has_none(write):
    table = tuning.read_table(write(data()))
    for op, entry in ENTRIES.items():
        if "length" not in entry["key"]:
            continue
        key = tuning.bucketed(op, **entry["key"] | {"length": 2 * entry["key"]["length"] - 1})
        found = table.find(op, key)
        assert found == (entry["config"] if tuning.OPS[op].serves_double else {})


def test_rows_of_a_verification_have_the_cut_of_decoding(write, paged_case):
    table = tuning.read_table(write(data()))
    lengths = np.array([[38, 39, 40], [62, 63, 64]] + [[0, 0, 0]] * 5)
    case = paged_case(lengths, heads=2, kv_heads=2, page_size=8, max_pages=8)
    last = case.replace(q=case.q[:, -1:], lengths=case.lengths[:, -1:])
    with tuning.using(table):
        configs = [
            paged.find_config(c.q.shape, c.k_pool.shape, 8, "float32") for c in (case, last)
        ]
        rows, one = (paged.paged_attention_pallas(*c.args) for c in (case, last))
    assert configs[0] == configs[1]
    assert configs[0].splits == 3
    # Interpreted, they are two programs of XLA's, which need not round alike.
    np.testing.assert_allclose(rows[:, -1:], one, rtol=1e-5, atol=1e-6)


def test_a_prefill_is_not_looked_up(write):
    table = tuning.read_table(write(data()))
    shapes = ((8, 64, 2, 16), (9, 2, 8, 16), 8, "float32")
    with tuning.using(table):
        assert paged.find_config(*shapes) == paged.choose_config(*shapes)


def test_an_unknown_device_computes():
    assert tuning.device_table("no such device") is None
    assert tuning.current_table() is None or jax.default_backend() == "gpu"


def test_names_of_files():
    assert tuning.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tuning.file_name("NVIDIA A100-SXM4-80GB") == "nvidia_a100_sxm4_80gb.json"


def test_a_file_of_another_device_is_refused(write, monkeypatch):
    path = write(data(device="Test 2"))
    monkeypatch.setattr(tuning, "folder", lambda: path.parent)
    tuning.device_table.cache_clear()
    with pytest.raises(ValueError, match=r"test_1.json: device is 'Test 2', it should be"):
        tuning.device_table("Test 1")


def changed(op: str, part: str, **values) -> dict:
    """The data with one part of an op's entry changed; None takes a value away."""
    merged = ENTRIES[op][part] | values
    entry = ENTRIES[op] | {part: {k: v for k, v in merged.items() if v is not None}}
    return data(ops={op: [entry]})


BROKEN = {
    "not JSON": ("{", "not JSON"),
    "not an object": ("[]", r"the file must be an object, got \[\]"),
    "no device": ({"ops": {}}, "the file has no 'device'"),
    "a device that is no name": (data(device=7), "the file.device must be a string, got 7"),
    "an unknown op": (data(ops={"prefill": []}), "ops: 'prefill' is none of"),
    "entries in no list": (data(ops={"select_keys": {}}), "ops.select_keys must be a list"),
    "no key": (data(ops={"select_keys": [{}]}), r"ops.select_keys\[0\] has no 'key'"),
    "no config": (
        data(ops={"select_keys": [{"key": {"rows": 1, "length": 1}}]}),
        r"ops.select_keys\[0\] has no 'config'",
    ),
    "a key without a part": (
        changed("select_keys", "key", rows=None),
        r"ops.select_keys\[0\].key must have \('rows', 'length'\), got \('length',\)",
    ),
    "a key without a dtype": (
        changed("paged_attention", "key", dtype=None),
        r"ops.paged_attention\[0\].key has no 'dtype'",
    ),
    "a size outside its bucket": (
        changed("select_keys", "key", rows=12),
        r"key.rows must be a power of two, got 12",
    ),
    "an unknown field": (
        changed("select_keys", "config", groups=4),
        r"config must have \('num_warps',\), got \('num_warps', 'groups'\)",
    ),
    "a field that is no integer": (
        changed("select_keys", "config", num_warps="8"),
        r"ops.select_keys\[0\].config.num_warps must be an integer, got '8'",
    ),
    "a truth value": (
        changed("select_keys", "config", num_warps=True),
        r"config.num_warps must be an integer, got True",
    ),
    "a field that is not positive": (
        changed("sparse_attention", "config", splits=0),
        r"config.splits must be positive, got 0",
    ),
    "an entry twice": (
        data(ops={"select_keys": [ENTRIES["select_keys"]] * 2}),
        r"ops.select_keys\[1\].key: \{'rows': 16, 'length': 64\} is there twice",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_clear_error(name, write):
    content, message = BROKEN[name]
    with pytest.raises(ValueError, match=rf"^test_1.json: .*{message}"):
        tuning.read_table(write(content))


@pytest.mark.parametrize(
    ("op", "value", "message"),
    [
        ("paged_attention", {"block_keys": 24}, "block_keys must be a power of two, got 24"),
        (
            "sparse_attention",
            {"block_keys": 8},
            "block_keys must be a power of two of at least",
        ),
        ("select_keys", {"num_warps": 3}, "num_warps must be a power of two, got 3"),
    ],
)
def test_an_entry_that_is_no_configuration_is_named(op, value, message, write, monkeypatch):
    table = tuning.read_table(write(changed(op, "config", **value)))
    described = r"\{.*'length': \d+.*\}"
    with (
        tuning.using(table),
        pytest.raises(ValueError, match=rf"^test_1.json: {op}: .*{described}.*: {message}"),
    ):
        used(monkeypatch, op, ENTRIES[op]["key"])


def test_a_lookup_by_other_names_is_refused():
    with pytest.raises(ValueError, match=r"select_keys is looked up by \('rows', 'length'\)"):
        tuning.bucketed("select_keys", rows=1)
