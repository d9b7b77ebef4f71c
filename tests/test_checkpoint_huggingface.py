"""Hugging Face directories: names, shapes, shards, and what is wrong with bad ones."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparse_loop_jax.checkpoint import load_huggingface, save_huggingface
from sparse_loop_jax.checkpoint.huggingface import HuggingFaceSource, pieces
from sparse_loop_jax.checkpoint.shards import plan_shards
from sparse_loop_jax.checkpoint.source import ParamsSource, leaf_shapes, leaves
from sparse_loop_jax.models import OURO_1_4B, Ouro, OuroConfig, param_shapes

INDEX = "model.safetensors.index.json"
TINY = OuroConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=32,
)


def random_model(dtype: str = "float32", config: OuroConfig = TINY) -> Ouro:
    rng = np.random.default_rng(0)
    shapes = param_shapes(config, dtype)
    values = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(s.dtype), shapes)
    return Ouro(config, params=jax.tree.map(jnp.asarray, values))


@pytest.fixture(scope="module")
def model() -> Ouro:
    return random_model()


@pytest.fixture
def directory(model, tmp_path) -> Path:
    """A good checkpoint to spoil."""
    save_huggingface(model, tmp_path / "good")
    return tmp_path / "good"


@pytest.fixture
def sharded(model, tmp_path) -> Path:
    """A good checkpoint of several files to spoil."""
    save_huggingface(model, tmp_path / "sharded", shard_bytes=600)
    return tmp_path / "sharded"


def edit(path: Path, change) -> None:
    """Rewrites a JSON file, or the tensors of a safetensors file."""
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    else:
        value = {name: array.copy() for name, array in load_file(path).items()}
        change(value)
        save_file(value, path)


def problems(directory: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(directory))) as caught:
        load_huggingface(directory)
    return str(caught.value)


# Good checkpoints -------------------------------------------------------------------------


def test_gold_weights_equal_the_official_readers(gold):
    config, params = load_huggingface(gold.directory)
    assert config == gold.config
    expected = leaves(gold.params)
    for name, leaf in leaves(params).items():
        assert leaf.dtype == expected[name].dtype
        assert np.asarray(leaf).tobytes() == np.asarray(expected[name]).tobytes(), name


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.float32])
def test_rounded_while_loading(gold, dtype):
    _, params = load_huggingface(gold.directory, dtype=dtype)
    expected = leaves(gold.params)
    for name, leaf in leaves(params).items():
        assert leaf.dtype == jnp.dtype(dtype)
        rounded = np.asarray(expected[name]).astype(jnp.dtype(dtype))
        assert np.asarray(leaf).tobytes() == rounded.tobytes(), name


def test_the_published_names_and_shapes_of_the_large_model():
    layout = {piece.tensor: piece.shape for piece in pieces(OURO_1_4B)}
    assert len(layout) == 24 * 11 + 5
    assert layout["model.layers.23.self_attn.v_proj.weight"] == (2048, 2048)
    assert layout["model.layers.0.mlp.up_proj.weight"] == (5632, 2048)
    assert layout["model.early_exit_gate.bias"] == (1,)
    # The published file: 2,869,336,434 bytes, of which a little is header.
    assert 0 < 2_869_336_434 - 2 * OURO_1_4B.num_parameters < 100_000


def test_a_leaf_is_covered_by_its_pieces_exactly():
    shapes = leaf_shapes(TINY)
    rows = dict.fromkeys(shapes, 0)
    for piece in pieces(TINY):
        assert piece.row == rows[piece.leaf]
        assert piece.shape[1:] == shapes[piece.leaf][1:]
        rows[piece.leaf] += piece.shape[0]
    assert rows == {name: shape[0] for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard_bytes", [10**9, 600, 1])
def test_saved_files_are_official_and_load_bit_for_bit(tmp_path, dtype, shard_bytes):
    model = random_model(dtype)
    save_huggingface(model, tmp_path / "out", shard_bytes=shard_bytes)
    tensors = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        tensors |= load_file(path)
    want = leaves(model.params)
    for piece in pieces(TINY):
        rows = np.asarray(want[piece.leaf])[piece.row : piece.row + piece.shape[0]]
        assert tensors.pop(piece.tensor).tobytes() == rows.tobytes(), piece.tensor
    assert not tensors

    config, params = load_huggingface(tmp_path / "out")
    assert config == TINY
    for name, leaf in leaves(params).items():
        assert leaf.dtype == dtype
        assert np.asarray(leaf).tobytes() == np.asarray(want[name]).tobytes(), name


def test_the_index_of_a_sharded_checkpoint(sharded):
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files[0] == f"model-00001-of-{count:05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * TINY.num_parameters
    for name, file in index["weight_map"].items():
        assert name in load_file(sharded / file)


def test_shards_are_cut_by_their_bytes():
    f32 = np.dtype(np.float32)
    specs = {"a": (f32, (2,)), "b": (f32, (2,)), "c": (f32, (9,)), "d": (f32, (1,))}
    assert [list(s) for s in plan_shards(specs, 16)] == [["a", "b"], ["c"], ["d"]]
    assert [list(s) for s in plan_shards(specs, 15)] == [["a"], ["b"], ["c"], ["d"]]
    assert [list(s) for s in plan_shards(specs, 56)] == [["a", "b", "c", "d"]]


def test_a_tied_model(tmp_path):
    model = random_model(config=OuroConfig(**{**vars(TINY), "tie_word_embeddings": True}))
    save_huggingface(model, tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    config, params = load_huggingface(tmp_path / "tied")
    assert config.tie_word_embeddings
    assert params.head is None
    assert np.array_equal(params.lm_head, model.params.embed)


def test_weights_go_to_their_shardings(directory, model):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    _, params = load_huggingface(directory, sharding=device)
    assert all(leaf.sharding == device for leaf in leaves(params).values())

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = jax.tree.map(lambda leaf: spread if leaf.ndim == 2 else device, model.params)
    _, params = load_huggingface(directory, sharding=tree)
    for name, leaf in leaves(params).items():
        assert leaf.sharding == leaves(tree)[name], name

    with pytest.raises(ValueError, match="OuroParams of them with the 21 leaves"):
        load_huggingface(directory, sharding={"embed": device})


def test_an_ouro_and_its_weights_save_the_same(tmp_path, model):
    save_huggingface(model, tmp_path / "a")
    save_huggingface(model.params, tmp_path / "b", config=TINY)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_cache_of_the_hub_links_to_its_blobs(sharded, tmp_path):
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(sharded.iterdir())):
        shutil.copy(path, blobs / str(number))
        os.symlink(f"../../blobs/{number}", snapshot / path.name)
    config, _ = load_huggingface(snapshot)
    assert config == TINY


# Bad tensors ------------------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_missing_tensor(directory):
    edit(directory / "model.safetensors", lambda t: t.pop(Q))
    assert f"1 of its tensors do not fit config.json:\n  {Q} [16, 8] is missing" in problems(
        directory
    )


def test_a_renamed_tensor_and_the_nearest_name(directory):
    wrong = "model.layers.1.self_attn.query_proj.weight"
    edit(directory / "model.safetensors", lambda t: t.update({wrong: t.pop(Q)}))
    text = problems(directory)
    assert "2 of its tensors do not fit config.json" in text
    assert f"{Q} [16, 8] is missing; the nearest name there is {wrong} [16, 8]" in text
    assert f"{wrong} [16, 8] is not part of the model; the nearest expected name is {Q}" in text


def test_a_surplus_tensor(directory):
    name = "model.layers.2.mlp.up_proj.weight"
    edit(directory / "model.safetensors", lambda t: t.update({name: np.zeros((6, 8), "f4")}))
    assert f"{name} [6, 8] is not part of the model; the nearest expected name is" in problems(
        directory
    )


def test_misshapen_tensors_are_all_named(directory):
    def change(tensors):
        tensors[Q] = tensors[Q].T.copy()
        tensors["model.norm.weight"] = np.zeros(9, np.float32)
        tensors["model.early_exit_gate.bias"] = np.zeros((), np.float32)

    edit(directory / "model.safetensors", change)
    text = problems(directory)
    assert "3 of its tensors" in text
    assert f"{Q} has shape [8, 16], expected [16, 8]" in text
    assert "model.norm.weight has shape [9], expected [8]" in text
    assert "model.early_exit_gate.bias has shape [], expected [1]" in text


def test_another_naming_scheme_is_one_readable_error(directory):
    def change(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", "transformer.")] = tensors.pop(name)

    edit(directory / "model.safetensors", change)
    text = problems(directory)
    assert "is missing" in text
    assert len(text) < 20_000


def test_hostile_names_cost_neither_time_nor_text(directory):
    def change(tensors):
        for i in range(500):
            tensors[f"{i}" + "model." * 1000] = np.zeros(1, np.float32)

    edit(directory / "model.safetensors", change)
    text = problems(directory)
    assert "and 300 more" in text
    assert len(text) < 100_000


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            3,
            "11 of its tensors do not fit config.json:\n  model.layers.2.input_layernorm",
        ),
        (1, "model.layers.1.mlp.up_proj.weight [6, 8] is not part of the model"),
        (10**12, "num_hidden_layers is 1000000000000, but there are only 27 arrays"),
    ],
)
def test_another_number_of_layers(directory, layers, message):
    def change(config):
        config["num_hidden_layers"] = layers
        del config["layer_types"]

    edit(directory / "config.json", change)
    assert message in problems(directory)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "head_dim"])
def test_absurd_sizes_allocate_nothing(directory, key):
    edit(directory / "config.json", lambda config: config.update({key: 2 * 10**30}))
    assert "has shape" in problems(directory)


def test_the_tie_flag_must_agree_with_the_file(directory):
    edit(directory / "config.json", lambda c: c.update(tie_word_embeddings=True))
    text = problems(directory)
    assert "lm_head.weight [12, 8] is not part of the model" in text
    assert "tie_word_embeddings in config.json disagrees" in text

    edit(directory / "config.json", lambda c: c.update(tie_word_embeddings=False))
    edit(directory / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    text = problems(directory)
    assert "lm_head.weight [12, 8] is missing" in text
    assert "tie_word_embeddings in config.json disagrees" in text


def test_several_dtypes_need_a_choice(directory):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)

    edit(directory / "model.safetensors", change)
    with pytest.raises(ValueError, match="tensors are of bfloat16, float32; choose one"):
        load_huggingface(directory)
    _, params = load_huggingface(directory, dtype="float32")
    assert {leaf.dtype.name for leaf in leaves(params).values()} == {"float32"}


@pytest.mark.parametrize("dtype", ["float64", "int8", "nonsense", jnp.int32, 7, object()])
def test_an_unknown_dtype(directory, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        load_huggingface(directory, dtype=dtype)


def test_nothing_is_read_before_everything_is_checked(sharded, monkeypatch):
    def fail(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("sparse_loop_jax.checkpoint.huggingface.read_tensor_into", fail)
    last = sorted(sharded.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(ValueError, match="the file is truncated"):
        load_huggingface(sharded)


def test_a_truncated_single_file(directory):
    os.truncate(directory / "model.safetensors", 1000)
    with pytest.raises(ValueError, match="is truncated"):
        load_huggingface(directory)


# Bad directories --------------------------------------------------------------------------


def test_no_configuration_and_no_weights(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match="it has model-00001-of-00002") as caught:
        load_huggingface(directory)
    assert "pickles" in str(caught.value)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_huggingface(directory)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/x.safetensors",
        "../x.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "model.bin",
        "a\0.safetensors",
        "..\\x.safetensors",
    ],
)
def test_an_index_may_only_name_files_beside_it(sharded, name):
    def change(index):
        index["weight_map"]["lm_head.weight"] = name

    edit(sharded / INDEX, change)
    with pytest.raises(ValueError, match=r"only plain names of \.safetensors files"):
        load_huggingface(sharded)


def test_an_index_may_not_leave_through_a_link(sharded, tmp_path):
    first = min(sharded.glob("*.safetensors"))
    outside = tmp_path / "outside.safetensors"
    first.rename(outside)
    first.symlink_to(outside)
    with pytest.raises(ValueError, match=r"is a link to .*outside the directory"):
        load_huggingface(sharded)


def test_a_shard_that_is_missing(sharded):
    first = min(sharded.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"'{first.name}', which does not exist"):
        load_huggingface(sharded)


def test_an_index_that_disagrees_with_its_files(sharded):
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    moved = next(iter(load_file(last)))

    def change(index):
        index["weight_map"][moved] = first.name

    edit(sharded / INDEX, change)
    with pytest.raises(ValueError, match="does not agree with its files") as caught:
        load_huggingface(sharded)
    text = str(caught.value)
    assert f"{moved} should be in {first.name}, but is not; it is in {last.name}" in text

    (sharded / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match="but no index"):
        load_huggingface(sharded)


def test_a_tensor_that_the_index_does_not_know(sharded):
    first = min(sharded.glob("*.safetensors"))
    edit(first, lambda tensors: tensors.update(stray=np.zeros(1, np.float32)))
    with pytest.raises(ValueError, match=f"stray of {first.name} is not in the index"):
        load_huggingface(sharded)


def test_a_tensor_in_two_files(sharded):
    first, last = min(sharded.glob("*.safetensors")), max(sharded.glob("*.safetensors"))
    (name, *_) = load_file(first)
    edit(last, lambda tensors: tensors.update({name: np.zeros(1, np.float32)}))
    with pytest.raises(
        ValueError, match=f"{name} is in {last.name} as well as in {first.name}"
    ):
        load_huggingface(sharded)


def test_disagreements_are_listed_up_to_a_bound(sharded):
    first = min(sharded.glob("*.safetensors"))
    many = {f"stray{i}": np.zeros(1, np.float32) for i in range(230)}
    edit(first, lambda tensors: tensors.update(many))
    with pytest.raises(ValueError, match="and 30 more"):
        load_huggingface(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"lm_head.weight": 1}])
def test_a_malformed_index(sharded, weight_map):
    edit(sharded / INDEX, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ValueError, match="weight_map must map tensor names to file names"):
        load_huggingface(sharded)


def test_two_sets_of_weights(sharded, model, tmp_path):
    save_huggingface(model, tmp_path / "single")
    shutil.copy(tmp_path / "single" / "model.safetensors", sharded)
    with pytest.raises(ValueError, match=r"has model\.safetensors and an index that does not"):
        load_huggingface(sharded)


# Saving what cannot be saved --------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [0, -1, True, 1.5, None])
def test_shard_bytes_must_be_positive(tmp_path, model, shard_bytes):
    with pytest.raises(ValueError, match="shard_bytes must be a positive integer"):
        save_huggingface(model, tmp_path / "x", shard_bytes=shard_bytes)
    assert not any(tmp_path.iterdir())


def test_weights_need_a_configuration_that_fits(tmp_path, model):
    with pytest.raises(ValueError, match="weights alone need config"):
        save_huggingface(model.params, tmp_path / "x")
    with pytest.raises(ValueError, match="an Ouro has its own"):
        save_huggingface(model, tmp_path / "x", config=TINY)
    other = OuroConfig(**{**vars(TINY), "num_hidden_layers": 3, "vocab_size": 13})
    with pytest.raises(ValueError, match="does not fit its configuration") as caught:
        save_huggingface(model.params, tmp_path / "x", config=other)
    text = str(caught.value)
    assert "layers.2.qkv is missing" in text
    assert "embed has shape (12, 8), expected (13, 8)" in text
    tied = OuroConfig(**{**vars(TINY), "tie_word_embeddings": True})
    with pytest.raises(ValueError, match="head is not part of the model"):
        save_huggingface(model.params, tmp_path / "x", config=tied)
    assert not any(tmp_path.iterdir())


def test_a_value_that_the_dtype_cannot_hold(tmp_path, model):
    big = jax.tree.map(lambda leaf: leaf, model.params)
    big = type(big)(**{**vars(big), "norm": big.norm.at[3].set(1e6)})
    with pytest.raises(ValueError, match=r"tensor norm: the value 1000000\.0 is out of"):
        save_huggingface(big, tmp_path / "x", config=TINY, dtype="float16")
    assert not any(tmp_path.iterdir())


def test_weights_of_a_dtype_that_no_checkpoint_has(tmp_path, model):
    half = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.params)
    with pytest.raises(ValueError, match="dtype must be one of"):
        save_huggingface(half, tmp_path / "x", config=TINY)
    assert not any(tmp_path.iterdir())


def test_weights_of_several_processes(tmp_path, model, monkeypatch):
    monkeypatch.setattr(type(model.params.embed), "is_fully_addressable", False)
    with pytest.raises(ValueError, match="leaf embed is spread over several processes"):
        ParamsSource(model.params, TINY)


def test_an_absent_config_is_named_first(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "config.json"))):
        HuggingFaceSource(tmp_path)
