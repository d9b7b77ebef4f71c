"""Choosing an implementation of an op."""

from __future__ import annotations

import jax
import pytest

from sparse_loop_jax import kernels
from sparse_loop_jax.kernels import registry
from sparse_loop_jax.kernels.registry import Op

OPS = [value for value in vars(kernels).values() if isinstance(value, Op)]


@pytest.fixture
def op(monkeypatch) -> Op:
    """An op with three implementations, asked in the order first, second."""
    order = {jax.default_backend(): ("absent", "first", "second")}
    monkeypatch.setattr(registry, "PREFERENCE", order)
    op = Op("example")

    @op.register("first")
    def first(x, *, scale=1):
        if x > 10:
            raise NotImplementedError("x is too large")
        if x < 0:
            raise ValueError("x is negative")
        return "first", x * scale

    @op.register("second")
    def second(x, *, scale=1):
        if x > 100:
            raise NotImplementedError("x is much too large")
        return "second", x * scale

    @op.register("by name only")
    def third(x, *, scale=1):
        return "third", x * scale

    return op


def test_the_first_that_can_serve_is_used(op):
    assert op(5, scale=2) == ("first", 10)
    assert op(50, scale=2) == ("second", 100)


def test_a_named_one_is_used_or_fails(op):
    assert op(5, implementation="second") == ("second", 5)
    assert op(500, implementation="by name only") == ("third", 500)
    with pytest.raises(NotImplementedError, match=r"^x is too large$"):
        op(50, implementation="first")


def test_when_none_can_serve_every_reason_is_told(op):
    with pytest.raises(
        NotImplementedError,
        match=r"of example can serve.*first: x is too large.*second: x is much too large",
    ):
        op(500)


def test_wrong_arguments_are_not_passed_on(op):
    with pytest.raises(ValueError, match="x is negative"):
        op(-1)


def test_an_unknown_name_lists_the_known(op):
    with pytest.raises(
        ValueError,
        match="must be one of example's, by name only, first, second: got 'cuda'",
    ):
        op(1, implementation="cuda")


def test_a_name_is_taken_once(op):
    with pytest.raises(ValueError, match="example already has an implementation 'first'"):
        op.register("first")(lambda x: x)
    assert op(1) == ("first", 1)


def test_a_platform_without_an_order_gets_the_reference(monkeypatch):
    monkeypatch.setattr(registry, "PREFERENCE", {})
    op = Op("example")
    op.register("xla")(lambda: "xla")
    op.register("other")(lambda: "other")
    assert op() == "xla"


def test_there_are_ops():
    assert {op.name for op in OPS} >= {"paged_attention", "write_kv"}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_has_a_documented_reference(op):
    assert "xla" in op.implementations
    documentation = op.get("xla").__doc__
    assert "Args:" in documentation
    assert "Returns:" in documentation


@pytest.mark.parametrize("platform", registry.PREFERENCE)
def test_every_platform_ends_with_the_reference(platform):
    assert registry.PREFERENCE[platform][-1] == "xla"
