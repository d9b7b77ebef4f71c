"""Which rounds are compiled with options, and that no other program is."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import compiling
from sparse_loop_jax.decoding.device_loop import decode_tokens


@dataclasses.dataclass(frozen=True)
class _Spec:
    sparse: str | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    token: Any
    spec: _Spec = dataclasses.field(metadata={"static": True})


def _state(sparse: bool) -> Any:
    return _State(jnp.int32(1), _Spec("mean" if sparse else None))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize(
    ("which", "dense", "sparse"),
    [("sparse", False, True), ("all", True, True), ("none", False, False)],
)
def test_the_constant_says_whose_rounds_run_kernels_side_by_side(
    monkeypatch, on_gpu, which, dense, sparse
):
    monkeypatch.setattr(compiling, "CONCURRENT", which)
    assert bool(compiling.options_for(_state(sparse=False))) == dense
    assert bool(compiling.options_for(_state(sparse=True))) == sparse


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.11.2", True),
        ("0.12.0.1", True),
        ("0.12.1.dev20261101", True),
        ("0.13.0", False),
    ],
)
def test_only_compilers_that_know_the_options_get_them(monkeypatch, on_gpu, version, known):
    monkeypatch.setattr(compiling.jaxlib, "__version__", version)
    assert bool(compiling.options_for(_state(sparse=True))) == known


def test_no_other_backend_gets_them():
    assert jax.default_backend() == "cpu"
    assert compiling.options_for(_state(sparse=True)) == {}


def test_the_compiler_knows_the_options():
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=compiling.OPTIONS)


def _add(params, state: Any):
    return dataclasses.replace(state, token=state.token + params)


def test_options_reach_the_compiler_of_whole_sparse_programs_alone(monkeypatch, on_gpu):
    # The compiler names what it does not know, so it was told.
    monkeypatch.setattr(compiling, "OPTIONS", {"xla_no_such_option": "1"})
    add = compiling.program(donate_argnames=("state",))(_add)
    told = pytest.raises(RuntimeError, match="xla_no_such_option")
    dense = _state(sparse=False)
    assert add(1, dense).token == 2
    assert dense.token.is_deleted()
    with told:
        add(1, _state(sparse=True))
    with told:
        add.lower(1, state=_state(sparse=True)).compile()
    with told:
        add.trace(1, _state(sparse=True)).lower().compile()
    add.lower(1, _state(sparse=False)).compile()
    assert jax.jit(lambda s: add(1, s))(_state(sparse=True)).token == 2


@pytest.mark.parametrize("step", [slj.decode_step, slj.speculative_step, decode_tokens])
def test_rounds_go_through_the_door(step):
    assert isinstance(step, compiling.Program)
    assert step.__doc__
