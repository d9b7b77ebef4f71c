"""config.json: every key is used, known to be harmless, or refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from sparse_loop_jax.checkpoint.huggingface_config import (
    HARMLESS,
    config_from_dict,
    config_to_dict,
    token_ids,
)
from sparse_loop_jax.checkpoint.strict_json import read_json_object
from sparse_loop_jax.models import OURO_1_4B, OURO_2_6B, OuroConfig

F32 = np.dtype(np.float32)
BASE = config_to_dict(OURO_1_4B, F32)


def read(**changes) -> OuroConfig:
    return config_from_dict({**BASE, **changes}, "config.json")


def test_gold_configurations(load_gold):
    for name in ("mha", "gqa"):
        gold = load_gold(name)
        path = gold.directory / "config.json"
        assert config_from_dict(read_json_object(path), str(path)) == gold.config


@pytest.mark.parametrize(
    "config",
    [
        OURO_1_4B,
        OURO_2_6B,
        OuroConfig(
            vocab_size=7,
            hidden_size=8,
            intermediate_size=3,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            max_position_embeddings=9,
            rope_theta=500.0,
            rms_norm_eps=1e-5,
            total_ut_steps=3,
            tie_word_embeddings=True,
            early_exit_threshold=0.25,
            bos_token_id=None,
            eos_token_ids=(1, 5),
            initializer_range=0.5,
        ),
    ],
)
def test_there_and_back_through_json(config):
    text = json.dumps(config_to_dict(config, F32))
    assert config_from_dict(json.loads(text), "config.json") == config


def test_what_the_official_configurations_contain_is_accepted():
    config = read(
        architectures=["OuroForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
        early_exit_threshold=1,
        max_window_layers=28,
        pad_token_id=0,
        rope_theta=1000000,
        torch_dtype="bfloat16",
        dtype="bfloat16",
        transformers_version="4.55.0",
        use_cache=False,
    )
    assert config == OURO_1_4B
    assert type(config.rope_theta) is float


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_harmless_keys_change_nothing(key):
    assert read(**{key: "anything"}) == OURO_1_4B


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (0, (0,)), ([0, 2], (0, 2)), ([2, 2], (2,)), ([], ())]
)
def test_stop_ids(value, ids):
    assert read(eos_token_id=value).eos_token_ids == ids
    assert token_ids(value) == ids


def test_rope_parameters_are_the_newer_spelling_of_rope_theta():
    without = {key: value for key, value in BASE.items() if key != "rope_theta"}
    new = {**without, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert config_from_dict(new, "config.json") == OURO_1_4B
    assert read(rope_parameters=None) == OURO_1_4B


REFUSED = {
    "rope_type": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
        "rope_parameters = {'rope_type': 'yarn'",
    ),
    "two thetas": ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = "),
    "rope_parameters has more": (
        {"rope_parameters": {"rope_theta": 1e6, "factor": 2}},
        "rope_parameters = ",
    ),
    "rope_parameters is a list": ({"rope_parameters": []}, "rope_parameters = []"),
    "unknown key": ({"qk_norm": True}, "unknown key qk_norm = True"),
    "quantised": ({"quantization_config": {"bits": 4}}, "unknown key quantization_config"),
    "model type": (
        {"model_type": "llama"},
        "model_type = 'llama' is not supported, only 'ouro'",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
    "rope scaling": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling = {'type': 'linear', 'factor': 2.0} is not supported, only None",
    ),
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window = True is not supp"),
    "sliding window as 0": ({"use_sliding_window": 0}, "use_sliding_window = 0 is not supp"),
    "window size": ({"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
    "attention bias": ({"attention_bias": True}, "attention_bias = True is not supported"),
    "MLP bias": ({"mlp_bias": True}, "mlp_bias = True is not supported"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
    "exit step": ({"early_exit_step": 2}, "early_exit_step = 2 is not supported, only None"),
    "chunk size": ({"chunk_size": 1}, "chunk_size = 1 is not supported, only None"),
    "layer type": (
        {"layer_types": ["sliding_attention"] * 24},
        "only 'full_attention'",
    ),
    "layer types is a string": ({"layer_types": "full_attention"}, "only 'full_attention'"),
    "number of layer types": (
        {"layer_types": ["full_attention"] * 23},
        "layer_types has 23 entries, num_hidden_layers is 24",
    ),
    "tie flag": ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' is no boolean"),
    "eos text": ({"eos_token_id": "2"}, "eos_token_id = '2' is no token id"),
    "eos boolean": ({"eos_token_id": True}, "eos_token_id = True is no token id"),
    "eos outside": ({"eos_token_id": 49152}, "eos_token_ids has 49152, which is outside"),
    "bos outside": ({"bos_token_id": -1}, "bos_token_id has -1, which is outside"),
    "hidden size": ({"hidden_size": 2048.0}, "hidden_size must be a positive integer"),
    "head_dim null": ({"head_dim": None}, "head_dim must be a positive integer, got None"),
    "huge theta": ({"rope_theta": 10**400}, "rope_theta has more than 64 bits"),
    "theta": ({"rope_theta": 0}, "rope_theta must be a positive number"),
    "threshold": ({"early_exit_threshold": 1.5}, "early_exit_threshold must be in [0, 1]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_value(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json: ")


def test_all_problems_come_at_once():
    raw = {**BASE, "hidden_act": "relu", "surprise": 1, "another": 2}
    for key in ("head_dim", "total_ut_steps", "model_type"):
        del raw[key]
    with pytest.raises(ValueError, match="not a supported configuration") as caught:
        config_from_dict(raw, "config.json")
    text = str(caught.value)
    assert "hidden_act = 'relu'" in text
    assert "surprise = 1" in text
    assert "another = 2" in text
    assert "missing keys: head_dim, total_ut_steps, model_type" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "expected a JSON object, got list"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b"{", "not valid JSON"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_strict_json(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_json_files_are_bounded(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path, limit=8) == {"a": 1}
    with pytest.raises(ValueError, match="8 bytes of JSON are more than the limit of 7"):
        read_json_object(path, limit=7)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_json_object(tmp_path / "missing.json")
