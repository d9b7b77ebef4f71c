"""`OuroConfig`: what it refuses and what it counts."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from sparse_loop_jax.models import OURO_1_4B, OURO_2_6B, OuroConfig, param_shapes

SMALL = OuroConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "total_ut_steps",
)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "8"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a positive integer, got {value!r}$"):
        dataclasses.replace(SMALL, **{name: value})


@pytest.mark.parametrize("value", [0, -1e-6, math.nan, True, None, "1"])
@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "initializer_range"])
def test_positive_numbers(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a positive number, got {value!r}$"):
        dataclasses.replace(SMALL, **{name: value})


def test_head_dim_is_even():
    with pytest.raises(ValueError, match="head_dim must be even for rotary halves, got 7"):
        dataclasses.replace(SMALL, head_dim=7)


def test_query_heads_are_a_multiple_of_kv_heads():
    message = r"num_attention_heads \(6\) must be a multiple of num_key_value_heads \(4\)"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, num_key_value_heads=4)


@pytest.mark.parametrize("value", [-0.1, 1.01, math.nan])
def test_threshold_is_a_probability(value):
    with pytest.raises(ValueError, match=r"early_exit_threshold must be in \[0, 1\], got"):
        dataclasses.replace(SMALL, early_exit_threshold=value)


@pytest.mark.parametrize("value", [True, None, "0.5"])
def test_threshold_is_a_number(value):
    with pytest.raises(ValueError, match="early_exit_threshold must be a number, got"):
        dataclasses.replace(SMALL, early_exit_threshold=value)


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_thresholds_that_are_taken(value):
    assert dataclasses.replace(SMALL, early_exit_threshold=value).early_exit_threshold == value


@pytest.mark.parametrize(
    "change",
    [{"bos_token_id": 97}, {"bos_token_id": -1}, {"eos_token_ids": (3, 97)}],
    ids=str,
)
def test_special_ids_are_inside_the_vocabulary(change):
    with pytest.raises(ValueError, match="which is outside the vocabulary of 97"):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    "change",
    [{"bos_token_id": 1.0}, {"bos_token_id": True}, {"eos_token_ids": (None,)}],
    ids=str,
)
def test_special_ids_are_integers(change):
    with pytest.raises(ValueError, match="must be token ids, got"):
        dataclasses.replace(SMALL, **change)


def test_special_ids_may_be_absent():
    config = dataclasses.replace(SMALL, bos_token_id=None, eos_token_ids=())
    assert config.eos_token_ids == ()


def test_configs_are_static_arguments():
    assert hash(SMALL) == hash(dataclasses.replace(SMALL))
    assert dataclasses.replace(SMALL, total_ut_steps=3) != SMALL
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.vocab_size = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "config",
    [SMALL, dataclasses.replace(SMALL, tie_word_embeddings=True), OURO_1_4B, OURO_2_6B],
    ids=["small", "tied", "1.4b", "2.6b"],
)
def test_parameters_are_those_of_the_shapes(config):
    shapes = jax.tree.leaves(param_shapes(config, "bfloat16"))
    assert config.num_parameters == sum(math.prod(leaf.shape) for leaf in shapes)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)
    assert nbytes == 2 * config.num_parameters


def test_published_sizes():
    # 24 layers of 4 * 2048^2 + 3 * 2048 * 5632 + 4 * 2048, two tables of 49152 * 2048,
    # a final norm, and the exit gate with its bias.
    assert OURO_1_4B.num_parameters == 1_434_652_673
    # 4 loops * 24 layers * (K and V) * 16 heads * 128 * 2 bytes.
    assert OURO_1_4B.kv_bytes_per_token(itemsize=2) == 786_432
    assert OURO_2_6B.kv_bytes_per_token(itemsize=2) == 2 * 786_432


def test_kv_bytes_count_key_heads_only():
    planes = SMALL.total_ut_steps * SMALL.num_hidden_layers
    assert SMALL.kv_bytes_per_token(itemsize=4) == planes * 2 * 2 * 8 * 4
    assert SMALL.qkv_size == (6 + 2 * 2) * 8
