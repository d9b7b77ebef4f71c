"""Peak memory of a conversion, on a checkpoint that is large enough to see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparse_loop_jax.checkpoint.dtypes import BFLOAT16
from sparse_loop_jax.checkpoint.huggingface import HuggingFaceSource, write_huggingface
from sparse_loop_jax.checkpoint.source import leaf_shapes
from sparse_loop_jax.models import OuroConfig

LARGE = OuroConfig(
    vocab_size=25600,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
)
SMALL = OuroConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)

# VmHWM and not ru_maxrss: the latter begins with the peak of the process that started this.
MEASURE = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from sparse_loop_jax import convert, load
result = convert(*sys.argv[1:]) if sys.argv[2:] else load(sys.argv[1])
with open("/proc/self/status") as status:
    line = next(line for line in status if line.startswith("VmHWM"))
print(json.dumps(int(line.split()[1]) * 1024))
"""


class RandomBits:
    """A model of random bits, NaN among them: nothing compresses, nothing may change."""

    name = "random bits"

    def __init__(self, config: OuroConfig):
        self.config = config
        self.dtypes = frozenset([BFLOAT16])
        self._shapes = leaf_shapes(config)
        self._rng = np.random.default_rng(0)

    def read(self, leaf: str, dtype: np.dtype) -> np.ndarray:
        return self._rng.integers(0, 2**16, self._shapes[leaf], np.uint16).view(dtype)


def make(directory: Path, config: OuroConfig, **options) -> Path:
    directory.mkdir()
    write_huggingface(directory, RandomBits(config), BFLOAT16, **options)
    return directory


def peak_bytes(*paths: Path) -> int:
    """Peak resident memory of a process that converts one path to another, or loads one."""
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=[10**12, 150 * 10**6], ids=["single", "sharded"])
def checkpoints(request, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint whose memory is lost in the interpreter's, and one of 620 MB."""
    directory = tmp_path_factory.mktemp("memory")
    return (
        make(directory / "small", SMALL),
        make(directory / "large", LARGE, shard_bytes=request.param),
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory(checkpoints, tmp_path):
    small, large = checkpoints
    model = HuggingFaceSource(large).nbytes
    tensor = LARGE.vocab_size * LARGE.hidden_size * 2
    assert model >= 500 * 10**6

    def above_small(what, smalls, larges):
        baseline, peak = peak_bytes(*smalls), peak_bytes(*larges)
        print(f"{what}: {(peak - baseline) / 1e6:.0f} MB above {baseline / 1e6:.0f} MB")
        return peak - baseline

    native, back = [tmp_path / "s1", tmp_path / "l1"], [tmp_path / "s2", tmp_path / "l2"]
    # A conversion does not even hold the model: a leaf, its compressed form and buffers.
    assert above_small("to native", (small, native[0]), (large, native[1])) < model
    assert above_small("and back", (native[0], back[0]), (native[1], back[1])) < model
    assert above_small("load", [small], [large]) < model + 2 * tensor
    assert above_small("load native", native[:1], native[1:]) < model + 2 * tensor

    before, after = HuggingFaceSource(large), HuggingFaceSource(back[1])
    for leaf in leaf_shapes(LARGE):
        old, new = before.read(leaf, BFLOAT16), after.read(leaf, BFLOAT16)
        assert np.array_equal(old.view(np.uint16), new.view(np.uint16)), leaf
