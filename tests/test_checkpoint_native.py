"""The native format, conversion both ways, and writing completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from sparse_loop_jax.checkpoint import (
    convert,
    load,
    load_huggingface,
    load_orbax,
    save_huggingface,
    save_orbax,
)
from sparse_loop_jax.checkpoint.source import leaf_shapes, leaves
from sparse_loop_jax.models import Ouro, OuroConfig, param_shapes

MANIFEST = "sparse_loop_jax.json"
CONFIG = OuroConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=32,
    eos_token_ids=(0, 3),
)
TIED = OuroConfig(**{**vars(CONFIG), "tie_word_embeddings": True, "bos_token_id": None})


def random_bits(dtype: str, config: OuroConfig = CONFIG) -> Ouro:
    """A model of random bit patterns: NaN payloads and subnormals have to survive too."""
    rng = np.random.default_rng(0)

    def make(leaf):
        raw = rng.integers(0, 256, (*leaf.shape, leaf.dtype.itemsize), np.uint8)
        return jnp.asarray(raw.view(leaf.dtype)[..., 0])

    return Ouro(config, params=jax.tree.map(make, param_shapes(config, dtype)))


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """By the official package, over all files of a directory."""
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert np.asarray(left[name]).tobytes() == np.asarray(right[name]).tobytes(), name


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    """A native checkpoint; copy it before spoiling it."""
    path = tmp_path_factory.mktemp("native") / "checkpoint"
    save_orbax(random_bits("bfloat16"), path)
    return path


@pytest.fixture
def spoiled(native, tmp_path) -> Path:
    return Path(shutil.copytree(native, tmp_path / "spoiled"))


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# There and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("config", "shard_bytes"), [(CONFIG, 10**9), (TIED, 500)])
def test_every_tensor_keeps_its_bytes(tmp_path, dtype, config, shard_bytes):
    save_huggingface(random_bits(dtype, config), tmp_path / "a", shard_bytes=shard_bytes)
    convert(tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c")
    before, after = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    files = list((tmp_path / "a").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 500)
    assert_same_bits(before, after)
    for name in ("a", "c"):
        text = (tmp_path / name / "config.json").read_text()
        assert json.loads(text)["torch_dtype"] == dtype
    assert (tmp_path / "a/config.json").read_bytes() == (
        tmp_path / "c/config.json"
    ).read_bytes()


def test_gold_there_and_back(gold, tmp_path):
    convert(gold.directory, tmp_path / "native")
    config, params = load_orbax(tmp_path / "native")
    assert config == gold.config
    assert_same_bits(leaves(params), leaves(gold.params))
    convert(tmp_path / "native", tmp_path / "back")
    assert_same_bits(tensors(tmp_path / "back"), tensors(gold.directory))


def test_an_ouro_through_the_native_format(tmp_path):
    model = random_bits("float16", TIED)
    save_orbax(model, tmp_path / "x")
    loaded = load(tmp_path / "x")
    assert loaded.config == TIED
    assert loaded.params.head is None
    assert_same_bits(leaves(loaded.params), leaves(model.params))
    save_orbax(model.params, tmp_path / "y", config=TIED)
    assert_same_bits(leaves(load_orbax(tmp_path / "y")[1]), leaves(model.params))


@pytest.mark.parametrize("native_source", [False, True])
def test_rounding_on_the_way(load_gold, tmp_path, native_source):
    source = load_gold("mha").directory
    if native_source:
        convert(source, tmp_path / "first")
        source = tmp_path / "first"
    convert(source, tmp_path / "out", dtype="bfloat16")
    read = load_huggingface if native_source else load_orbax
    _, params = read(tmp_path / "out")
    expected = leaves(load_gold("mha").params)
    for name, leaf in leaves(params).items():
        assert leaf.dtype == jnp.bfloat16
        rounded = np.asarray(expected[name]).astype(jnp.bfloat16)
        assert np.asarray(leaf).tobytes() == rounded.tobytes(), name


def test_plain_orbax_reads_the_weights(native):
    tree = ocp.PyTreeCheckpointer().restore(native / "params")
    expected = leaves(random_bits("bfloat16").params)
    assert (
        tree["layers"]["1"]["qkv"].tobytes() == np.asarray(expected["layers.1.qkv"]).tobytes()
    )


def test_no_device_is_named_in_the_files(native):
    for path in native.rglob("*"):
        if path.is_file():
            data = path.read_bytes().lower()
            for word in (b"cpu", b"cuda", b"gpu", b"sharding_type"):
                assert word not in data, path


def test_restores_to_other_shardings(native):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("somewhere",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, params = load_orbax(native, dtype="float32", sharding=sharding)
    for leaf in leaves(params).values():
        assert leaf.sharding == sharding
        assert leaf.dtype == jnp.float32


def test_two_devices():
    """Saved from two devices, restored on one and on two, in either format."""
    code = """
import os, tempfile
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from sparse_loop_jax.checkpoint import load, save_huggingface, save_orbax
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
one = load()
matrix = lambda leaf: leaf.ndim == 2 and len(leaf) > 1
places = jax.tree.map(lambda leaf: halves if matrix(leaf) else both, one.params)
two = load(sharding=places)
assert two.params.embed.addressable_shards[0].data.shape == (2048, 256)
with tempfile.TemporaryDirectory() as directory:
    for number, save in enumerate((save_huggingface, save_orbax)):
        save(two, f"{directory}/{number}")
        for sharding in (None, places):
            again = load(f"{directory}/{number}", sharding=sharding)
            for old, new in zip(jax.tree.leaves(one.params), jax.tree.leaves(again.params)):
                assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_orbax_is_asked_for_one_array_at_a_time(tmp_path):
    """Writing asks for each leaf when the ones before it are on the disk."""

    class Watched:
        name, config, dtypes = "watched", CONFIG, frozenset([np.dtype(np.float32)])

        def __init__(self):
            self.on_disk = []

        def read(self, leaf, dtype):
            files = (tmp_path / "x").rglob("*")
            self.on_disk.append(sum(f.stat().st_size for f in files if f.is_file()))
            return np.random.default_rng(0).random(leaf_shapes(CONFIG)[leaf]).astype(dtype)

    from sparse_loop_jax.checkpoint.orbax import write_orbax

    source = Watched()
    (tmp_path / "x").mkdir()
    write_orbax(tmp_path / "x", source, np.dtype(np.float32))
    assert len(source.on_disk) == len(leaf_shapes(CONFIG))
    assert np.all(np.diff(source.on_disk) > 0)


# Companions -------------------------------------------------------------------------------


def test_small_files_travel_unchanged(tmp_path):
    source = tmp_path / "a"
    save_huggingface(random_bits("float32"), source)
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    names += ["chat_template.jinja", "special_tokens_map.json"]
    for name in names:
        (source / name).write_bytes(f"{name}\r\n\xff".encode("latin1"))
    (source / "modeling_ouro.py").write_text("raise SystemExit")
    convert(source, tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c")
    for target in ("b", "c"):
        for name in names:
            assert (tmp_path / target / name).read_bytes() == (source / name).read_bytes()
        assert not (tmp_path / target / "modeling_ouro.py").exists()


# All or nothing ---------------------------------------------------------------------------


def test_an_empty_destination_is_filled(native, tmp_path):
    (tmp_path / "empty").mkdir()
    convert(native, tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert os.listdir(tmp_path) == ["empty"]


def test_a_destination_is_never_overwritten(native, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="exists already and is not an empty directory"):
            convert(native, tmp_path / name)
    with pytest.raises(ValueError, match="exists already"):
        convert(native, native)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        convert(native, tmp_path / "no" / "parent")
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["precious"]


@pytest.mark.parametrize("to_native", [False, True])
def test_a_failure_half_way_leaves_nothing(native, tmp_path, monkeypatch, to_native):
    source = native
    if to_native:
        source = tmp_path / "source"
        convert(native, source)

    def fail(*_):
        assert list(tmp_path.glob(".target.*.tmp"))
        raise OSError("disk full")

    monkeypatch.setattr("sparse_loop_jax.checkpoint.saving.copy_companions", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(source, tmp_path / "target")
    assert os.listdir(tmp_path) == (["source"] if to_native else [])


def test_a_bad_source_leaves_nothing(spoiled, tmp_path):
    (spoiled / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="this library reads"):
        convert(spoiled, tmp_path / "target")
    assert os.listdir(tmp_path) == ["spoiled"]


def test_an_error_while_orbax_writes_keeps_its_kind(load_gold, tmp_path):
    source = Path(shutil.copytree(load_gold("mha").directory, tmp_path / "source"))
    _, params = load_huggingface(source)
    huge = type(params)(**{**vars(params), "norm": params.norm + 1e6})
    shutil.rmtree(source)
    save_huggingface(huge, source, config=load_gold("mha").config)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: the value .* float16"):
        convert(source, tmp_path / "target", dtype="float16")
    assert os.listdir(tmp_path) == ["source"]


# Bad native checkpoints -------------------------------------------------------------------


def layers(count: int):
    def change(manifest):
        manifest["config"] |= {"num_hidden_layers": count, "layer_types": None}

    return change


BAD_MANIFESTS = {
    "another version": (lambda m: m.update(version=2), "version 2; this library reads"),
    "another format": (lambda m: m.update(format="x"), "format 'x' version 1; this library"),
    "no version": (lambda m: m.pop("version"), "version None"),
    "surplus key": (lambda m: m.update(extra=1), "expected format, version, dtype and config"),
    "no dtype": (lambda m: m.pop("dtype"), "expected format, version, dtype and config"),
    "dtype": (lambda m: m.update(dtype="int8"), "dtype must be one of .* got 'int8'"),
    "dtype is a list": (lambda m: m.update(dtype=[]), "dtype must be one of"),
    "other dtype": (lambda m: m.update(dtype="float32"), "says float32, but embed is bfloat16"),
    "config is a list": (lambda m: m.update(config=[]), r"config must be an object, got \[\]"),
    "missing key": (lambda m: m["config"].pop("head_dim"), "missing keys: head_dim"),
    "unknown key": (lambda m: m["config"].update(x=1), "unknown key x = 1"),
    "bad value": (lambda m: m["config"].update(head_dim=3), "head_dim must be even"),
    "shape": (
        lambda m: m["config"].update(vocab_size=13),
        r"embed has shape \(12, 8\), expected \(13, 8\)",
    ),
    "layers": (layers(3), "layers.2.qkv is missing"),
    "fewer": (layers(1), "layers.1.qkv is not part"),
    "absurd": (
        layers(10**12),
        "num_hidden_layers is 1000000000000, but there are only 21 arrays",
    ),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest(spoiled, case):
    change, message = BAD_MANIFESTS[case]
    edit(spoiled / MANIFEST, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_orbax(spoiled)
    assert str(spoiled) in str(caught.value)


def test_weights_that_orbax_cannot_open(spoiled):
    shutil.rmtree(spoiled / "params")
    with pytest.raises(ValueError, match="Orbax cannot read it"):
        load_orbax(spoiled)
    (spoiled / "params").mkdir()
    with pytest.raises(ValueError, match="Orbax cannot read it"):
        load_orbax(spoiled)
    (spoiled / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_orbax(spoiled)


def test_data_that_orbax_cannot_read(spoiled):
    for path in spoiled.rglob("d/*"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="Orbax cannot read it"):
        load_orbax(spoiled)
