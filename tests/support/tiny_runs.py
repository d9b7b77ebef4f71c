"""A toy corpus, a run on it and what comes out of that, for the tests of the recipe.

A test file names this module in `pytest_plugins`, so that its fixtures, which tests only
read, are made once for all files. PYTEST_DONT_REWRITE: the file has imported it by then.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_tiny import (
    corpus as corpora,
    evaluate,
    export,
    network,
    objective,
    prepare,
    train,
)
from sparse_loop_jax.models import OuroConfig

ROOT = Path(__file__).parent.parent.parent
TEXT = ROOT / "sparse_loop_jax/data/tiny-ouro/heldout.txt"
STEPS, LENGTH = 40, 96


def arguments(corpus: corpora.Corpus, out: Path, *more: str) -> list[str]:
    given = f"""--steps {STEPS} --hidden 32 --intermediate 48 --layers 1 --heads 2 --loops 3
        --stages 1:{LENGTH} --batch-tokens {16 * LENGTH} --rows {8 * LENGTH} --dtype float32
        --save-every 30 --log-every 10 --warmup 5 --peak 1e-2"""
    return ["--corpus", corpus.manifest["directory"], "--out", str(out), *given.split(), *more]


def log_of(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> corpora.Corpus:
    out = tmp_path_factory.mktemp("corpus")
    prepare.main(["--text", str(TEXT), "--out", str(out), "--vocabulary", "1024"])
    found = corpora.read(out)
    found.manifest["directory"] = str(out)
    return found


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory) -> Path:
    """A finished run that was never interrupted."""
    out = tmp_path_factory.mktemp("run")
    assert train.main(arguments(corpus, out))
    return out


@pytest.fixture(scope="session")
def exported(corpus, run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("export") / "tiny"
    folders = ["--run", str(run), "--corpus", corpus.manifest["directory"], "--out", str(out)]
    export.main([*folders, "--lengths", "96", "--count", "8"])
    return out


@pytest.fixture(scope="session")
def measured(exported, corpus, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("measured") / "new.json"
    given = ["--lengths", "96,300", "--count", "2", "--window", "64", "--json", str(path)]
    evaluate.main([str(exported), "--corpus", corpus.manifest["directory"], *given])
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def small(corpus):
    """A model, a batch of random tokens, and the objective in float32."""
    config = OuroConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        total_ut_steps=3,
    )
    params = network.initial_params(config, jax.random.key(1))
    gate = jax.random.normal(jax.random.key(2), params.exit_gate.shape)
    params = dataclasses.replace(params, exit_gate=gate)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 40, (2, 12)), jnp.int32)
    following = jnp.asarray(rng.integers(0, 40, (2, 12)), jnp.int32)
    weights = jnp.asarray(rng.uniform(0, 2, (2, 12)), jnp.float32)
    batch = objective.Batch(ids, jnp.stack([following] * 3), weights)
    return config, params, batch
