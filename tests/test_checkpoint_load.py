"""`load`: formats, the bundled model, tokenizers, stop ids, Hub ids."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import sparse_loop_jax as slj
from sparse_loop_jax.checkpoint import convert, load, load_orbax, save_huggingface, save_orbax
from sparse_loop_jax.checkpoint.source import leaves
from sparse_loop_jax.data import tiny_ouro

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def directory(load_gold, tmp_path) -> Path:
    """A copy of a golden checkpoint to change."""
    return Path(shutil.copytree(load_gold("mha").directory, tmp_path / "mha"))


@pytest.fixture
def tokenizer_file() -> Path:
    with importlib.resources.as_file(tiny_ouro()) as path:
        return path / "tokenizer.json"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value))


# The bundled model ------------------------------------------------------------------------


def test_the_bundled_model():
    model = load()
    assert model.config.num_hidden_layers == 5
    assert model.dtype == jnp.bfloat16
    assert model.config.num_parameters == sum(x.size for x in jax.tree.leaves(model.params))
    with importlib.resources.as_file(tiny_ouro()) as path:
        tensors = load_file(path / "model.safetensors")
        expected = tensors["model.layers.4.mlp.up_proj.weight"]
        tasks = [(path / f"{name}.jsonl").read_text() for name in ("recall", "hops")]
        assert len((path / "heldout.txt").read_text()) > 100_000
        assert (path / "README.md").read_text().startswith("---\nlicense:")
    up = np.asarray(model.params.layers[4].gate_up)[model.config.intermediate_size :]
    assert up.tobytes() == expected.tobytes()

    assert model.config.max_position_embeddings == 8192
    recall, hops = ([json.loads(line) for line in text.splitlines()] for text in tasks)
    assert len(recall) == len(hops) == 96
    assert {case["hops"] for case in hops} == set(range(1, 9))
    for case in (recall[0], recall[-1], hops[0], hops[-1]):
        ids = model.tokenizer.encode(case["prompt"]).ids
        assert abs(len(ids) - case["tokens"]) < 8  # it was made of pieces
        assert model.tokenizer.decode(ids) == case["prompt"]


def test_the_bundled_model_reads_english_better_than_chance():
    model = load(dtype="float32")
    with importlib.resources.as_file(tiny_ouro()) as path:
        text = (path / "heldout.txt").read_text()[:1200]
    ids = jnp.asarray(model.tokenizer.encode(text).ids)
    logits = slj.forward(model, ids).loop_logits()[0]
    nats = -jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids) - 1), ids[1:]].mean()
    assert 2.5 < float(nats) < 4.5  # chance is ln 4096 = 8.3


def test_the_bundled_model_follows_pointers_with_its_last_loops():
    """One token of the answer is a step for each loop, and the last loop takes the fourth."""
    model = load(dtype="float32")
    with importlib.resources.as_file(tiny_ouro()) as path:
        lines = (path / "hops.jsonl").read_text().splitlines()
    cases = [case for case in map(json.loads, lines) if case["tokens"] <= 256]
    right = np.zeros((4, 9), int)
    for case in cases:
        ids = model.tokenizer.encode(case["prompt"] + case["answer"]).ids
        said = np.asarray(slj.forward(model, jnp.asarray(ids)).logits[:, 0].argmax(axis=-1))
        start = case["tokens"]
        right[:, case["hops"]] += (said[:, start - 1 : -1] == ids[start:]).all(axis=-1)
    np.testing.assert_array_equal(right[3, 1:], 2)  # two questions of each length
    np.testing.assert_array_equal(right[1, 3:], 0)


def test_it_needs_neither_torch_nor_safetensors():
    code = """
import sys
sys.modules |= {"torch": None, "safetensors": None, "huggingface_hub": None}
import sparse_loop_jax
assert sparse_loop_jax.load().dtype == "bfloat16"
assert "orbax" not in sys.modules  # imported only where it is needed
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Formats and arguments --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float16, np.dtype("float32")])
def test_both_formats_give_the_same_model(directory, gold, tmp_path, dtype):
    convert(directory, tmp_path / "native")
    first, second = load(directory, dtype=dtype), load(str(tmp_path / "native"), dtype=dtype)
    assert first.config == second.config
    assert first.dtype == jnp.dtype(dtype or "float32")
    for name, leaf in leaves(first.params).items():
        assert leaf.dtype == first.dtype
        other = leaves(second.params)[name]
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), name


def test_the_loaded_model_computes_the_golden_logits(gold):
    model = load(gold.directory)
    logits = slj.forward(model, gold.dense["p0_input_ids"]).logits[:, 0]
    np.testing.assert_allclose(logits, gold.dense["p0_logits"], atol=1e-3)


def test_sharding(directory):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    model = load(directory, sharding=device)
    assert all(leaf.sharding == device for leaf in jax.tree.leaves(model.params))


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path / 'no'}: no such dir")):
        load(tmp_path / "no")
    with pytest.raises(FileNotFoundError, match="is no checkpoint: it has neither config") as e:
        load(tmp_path)
    assert "sparse_loop_jax.json" in str(e.value)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; a checkpoint is a directory"):
        load(tmp_path / "model.safetensors")


def test_a_revision_is_for_the_hub(directory):
    with pytest.raises(ValueError, match="revision is for Hub ids"):
        load(directory, revision=COMMIT)
    with pytest.raises(ValueError, match="the bundled model has no revision"):
        load(revision=COMMIT)


# Tokenizers and stop ids ------------------------------------------------------------------


def test_a_checkpoint_without_a_tokenizer(directory):
    assert load(directory).tokenizer is None


def test_the_tokenizer_travels(tmp_path, tokenizer_file):
    model = load()
    save_huggingface(model, tmp_path / "a")
    save_orbax(model, tmp_path / "b")
    for name in ("a", "b"):
        again = load(tmp_path / name)
        assert (
            again.tokenizer.encode("Call me 123").ids
            == model.tokenizer.encode("Call me 123").ids
        )
    convert(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c/tokenizer.json").read_bytes() == (
        tmp_path / "a/tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize(
    "asked",
    [
        {"truncation": {
            "max_length": 3, "direction": "Right", "strategy": "LongestFirst", "stride": 0,
        }},
        {"padding": {
            "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 3, "pad_type_id": 0, "pad_token": "x",
        }},
    ],
    ids=["truncation", "padding"],
)  # fmt: skip
def test_a_tokenizer_neither_cuts_nor_pads(tmp_path, tokenizer_file, asked):
    directory = shutil.copytree(tokenizer_file.parent, tmp_path / "model")
    stored = json.loads(tokenizer_file.read_text())
    write_json(directory / "tokenizer.json", stored | asked)
    text = "Once upon a time there was"
    assert load(directory).tokenizer.encode(text).ids == load().tokenizer.encode(text).ids


def test_a_tokenizer_that_does_not_fit(directory, tokenizer_file, monkeypatch):
    shutil.copy(tokenizer_file, directory)

    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("sparse_loop_jax.checkpoint.loading.read_params", fail)
    with pytest.raises(ValueError, match="token id 4095, but the model's vocab_size is 128"):
        load(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        load(directory)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (0, {"eos_token_id": 2}, (0, 2)),
        (0, {"eos_token_id": [2, 0]}, (0, 2)),
        ([1, 2], {"eos_token_id": None}, (1, 2)),
        (None, {"eos_token_id": 7}, (7,)),
        (5, {"temperature": 0.7}, (5,)),
    ],
)
def test_stop_ids_are_those_of_both_files(directory, tmp_path, config, generation, expected):
    raw = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", {**raw, "eos_token_id": config})
    write_json(directory / "generation_config.json", generation)
    assert load(directory).config.eos_token_ids == expected
    # Also after a conversion, which keeps the two apart.
    convert(directory, tmp_path / "native")
    assert load(tmp_path / "native").config.eos_token_ids == expected
    own = (config,) if isinstance(config, int) else tuple(config or ())
    assert load_orbax(tmp_path / "native")[0].eos_token_ids == own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": 128}', "eos_token_ids has 128, which is outside"),
        ('{"eos_token_id": "</s>"}', "is no token id"),
        ("[]", "expected a JSON object"),
    ],
)
def test_a_bad_generation_config(directory, text, message):
    (directory / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(directory)
    assert "generation_config.json" in str(caught.value)


# The Hub ----------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, directory):
    """A `huggingface_hub` that answers every download with `directory`."""
    module: Any = types.ModuleType("huggingface_hub")
    module.calls = []

    def snapshot_download(*args, **kwargs):
        module.calls.append((args, kwargs))
        if isinstance(module.answer, Exception):
            raise module.answer
        return str(module.answer)

    module.answer = directory
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_a_hub_id_is_downloaded_at_its_commit(hub, gold, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = load("ByteDance/Ouro-1.4B", revision=COMMIT)
    assert model.config.num_hidden_layers == 2
    assert hub.calls == [
        (
            ("ByteDance/Ouro-1.4B",),
            {"revision": COMMIT, "allow_patterns": ["*.safetensors", "*.json", "*.jinja"]},
        )
    ]


def test_a_local_directory_comes_first(hub, directory, monkeypatch):
    monkeypatch.chdir(directory.parent.parent)
    load(f"{directory.parent.name}/{directory.name}")
    assert not hub.calls


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:39], COMMIT.upper()])
def test_a_hub_id_needs_a_commit(hub, monkeypatch, tmp_path, revision):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="revision must be the hash of a commit, 40 hex"):
        load("ByteDance/Ouro-1.4B", revision=revision)
    assert not hub.calls


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no such repo")])
def test_a_download_that_fails(hub, monkeypatch, tmp_path, error):
    monkeypatch.chdir(tmp_path)
    hub.answer = error
    with pytest.raises(ValueError, match=f"cannot be downloaded at {COMMIT}: {error}"):
        load("ByteDance/Ouro-1.4B", revision=COMMIT)


def test_without_huggingface_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=re.escape("pip install -e '.[hub]'")):
        load("ByteDance/Ouro-1.4B", revision=COMMIT)


@pytest.mark.parametrize("name", ["a/b/c", "/abs/path", "../up", "name", "~/x", "a/..", "a/ b"])
def test_paths_are_not_taken_for_hub_ids(hub, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load(name)
    assert not hub.calls


# The package ------------------------------------------------------------------------------


def test_public_names_resolve_and_hide_no_module():
    package = Path(slj.__file__).parent
    for name in slj.__all__:
        assert getattr(slj, name) is not None
        assert not (package / name).exists(), f"{name} is a public name and a module"
        assert not (package / f"{name}.py").exists(), f"{name} is a public name and a module"
    assert set(slj.__all__) <= set(dir(slj))
    assert slj.load is load
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = slj.nonsense


def test_importing_the_package_imports_nothing_heavy():
    code = """
import sys, sparse_loop_jax
heavy = {"jax", "flax", "numpy", "orbax", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
from sparse_loop_jax import load
from jax._src import xla_bridge
assert not xla_bridge._backends  # and no device is touched before a model is loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
