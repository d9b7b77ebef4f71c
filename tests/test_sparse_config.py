"""What a SparseDecodeConfig accepts, and what it says of each loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sparse_loop_jax.models.config import OURO_1_4B
from sparse_loop_jax.sparse import SparseDecodeConfig

D, C, S, R = "dense", "capture", "consume", "consume+capture"


@pytest.mark.parametrize(
    ("options", "loops", "modes"),
    [
        ({}, 4, (D, C, S, S)),
        ({"key_retention": 1.0}, 4, (D, D, D, D)),
        ({"key_retention": 1}, 1, (D,)),
        ({}, 3, (D, C, S)),
        ({"capture_loop": 0}, 4, (C, S, S, S)),
        ({"capture_loop": 2}, 4, (D, D, C, S)),
        ({"consume_loops": (3,)}, 4, (D, C, D, S)),
        ({"variant": "adjacent"}, 4, (D, C, R, S)),
        ({"variant": "adjacent"}, 5, (D, C, R, R, S)),
        ({"variant": "adjacent"}, 3, (D, C, S)),
        ({"variant": "adjacent", "capture_loop": 0, "consume_loops": (1, 3)}, 4, (C, R, D, S)),
    ],
)
def test_modes_of_the_loops(options, loops, modes):
    assert SparseDecodeConfig(**options).modes(loops) == modes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_retention": 0}, r"key_retention must be a number in \(0, 1\], got 0"),
        ({"key_retention": 1.01}, "key_retention .* got 1.01"),
        ({"key_retention": -0.1}, "key_retention .* got -0.1"),
        ({"key_retention": float("nan")}, "key_retention .* got nan"),
        ({"key_retention": True}, "key_retention .* got True"),
        ({"key_retention": "0.1"}, "key_retention .* got '0.1'"),
        ({"capture_loop": -1}, "capture_loop must be an integer >= 0, got -1"),
        ({"capture_loop": 1.0}, "capture_loop must be an integer >= 0, got 1.0"),
        ({"consume_loops": ()}, r"consume_loops must be a tuple of loops or None, got \(\)"),
        ({"consume_loops": [2, 3]}, "consume_loops must be a tuple"),
        ({"consume_loops": (2.0,)}, "consume_loops must be an integer >= 0, got 2.0"),
        ({"consume_loops": (1, 2)}, r"come after capture_loop 1, got \(1, 2\)"),
        ({"consume_loops": (3, 2)}, r"consume_loops must rise .* got \(3, 2\)"),
        ({"variant": "both"}, "variant must be 'joint' or 'adjacent', got 'both'"),
        ({"mass_scaling": "official"}, "mass_scaling must be .* got 'official'"),
        ({"implementation": 1}, "implementation must be a name, got 1"),
        ({"sink_keys": -1}, "sink_keys must be an integer >= 0, got -1"),
        ({"recent_keys": True}, "recent_keys must be an integer >= 0, got True"),
        ({"capacity": 0}, "capacity must be an integer >= 1, got 0"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SparseDecodeConfig(**options)


@pytest.mark.parametrize(
    ("options", "loops"),
    [
        ({}, 2),
        ({}, 1),
        ({"capture_loop": 3}, 4),
        ({"capture_loop": 9}, 4),
        ({"consume_loops": (2, 4)}, 4),
    ],
)
def test_loops_that_the_model_lacks_are_refused(options, loops):
    model = dataclasses.replace(OURO_1_4B, total_ut_steps=loops)
    with pytest.raises(ValueError, match=f"need more than the model's {loops} loops"):
        SparseDecodeConfig(**options).validate_for(model, 100)


def test_capacity_below_what_the_longest_context_needs_is_refused():
    config = SparseDecodeConfig(key_retention=0.1, capacity=6553)
    config.validate_for(OURO_1_4B, 65530)
    message = "capacity 6553 is below the 6554 keys that key_retention 0.1 keeps of 65536"
    with pytest.raises(ValueError, match=message):
        config.validate_for(OURO_1_4B, 65536)
    assert config.capacity_for(65530) == 6553
    assert SparseDecodeConfig(key_retention=0.1).capacity_for(65536) == 6554


def test_capacity_does_not_matter_where_every_key_is_kept():
    SparseDecodeConfig(key_retention=1.0, capacity=1).validate_for(OURO_1_4B, 65536)


@pytest.mark.parametrize("context", [0, 65537, True, 8.0])
def test_contexts_beyond_the_model_are_refused(context):
    with pytest.raises(ValueError, match=f"max_context .*{context}"):
        SparseDecodeConfig().validate_for(OURO_1_4B, context)


def test_a_capacity_beyond_the_model_is_refused():
    SparseDecodeConfig(capacity=65536).validate_for(OURO_1_4B, 100)
    with pytest.raises(ValueError, match="capacity 65537 is more keys than the model's 65536"):
        SparseDecodeConfig(capacity=65537).validate_for(OURO_1_4B, 100)


def test_numpy_numbers_become_plain_ones():
    given: Any = {
        "capture_loop": np.int64(0),
        "consume_loops": (np.int32(1), np.uint8(2)),
        "sink_keys": np.int8(1),
        "recent_keys": np.uint64(2),
        "capacity": np.int64(9),
    }
    config = SparseDecodeConfig(np.float64(0.3), **given)
    plain = SparseDecodeConfig(0.3, 0, (1, 2), sink_keys=1, recent_keys=2, capacity=9)
    assert config == plain
    assert repr(config) == repr(plain)


def test_a_narrow_float_means_what_it_prints():
    given: Any = np.float32(0.1)
    assert SparseDecodeConfig(given).key_retention == 0.1
    assert SparseDecodeConfig(given).keys_kept(100) == 10


def test_retentions_share_a_compiled_step():
    """What is kept is data; where and how is not."""
    one = SparseDecodeConfig(key_retention=0.1, capacity=700)
    assert one.compiled_part == SparseDecodeConfig(key_retention=0.02).compiled_part
    assert not one.compiled_part.is_dense
    for change in ({"capture_loop": 0}, {"variant": "adjacent"}, {"sink_keys": 1}):
        other = dataclasses.replace(one, **change)
        assert other.compiled_part != one.compiled_part


def test_a_config_is_hashable_and_frozen():
    config = SparseDecodeConfig(consume_loops=(2,))
    assert hash(config) == hash(SparseDecodeConfig(consume_loops=(2,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.key_retention = 0.5  # type: ignore[misc]
