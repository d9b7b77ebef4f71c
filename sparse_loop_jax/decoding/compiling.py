"""How the programs of a round are compiled: one door for every way to run them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jaxlib import version as jaxlib

from sparse_loop_jax.decoding.state import DecodeState

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Which states' rounds may run kernels side by side: "sparse", "all" or "none". Capturing and
# consuming have kernels that do not need each other; an H200 takes 4 to 5 % less time for a
# sparse step of one request.
CONCURRENT = "sparse"
# Command buffers then record what depends on what, in place of one kernel after the other.
OPTIONS: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
# The compilers that were seen to know these options: one that does not fails.
_KNOWN = ((0, 10, 2), (0, 13, 0))  # from, below


def options_for(state: DecodeState) -> dict[str, str | bool]:
    """What the compiler is told of the rounds of a state; nothing unless it is for a GPU."""
    wanted = CONCURRENT == "all" or (CONCURRENT == "sparse" and state.spec.sparse is not None)
    if not wanted or jax.default_backend() != "gpu" or not _compiler_knows():
        return {}
    return OPTIONS


def _compiler_knows() -> bool:
    parts = jaxlib.__version__.split(".")[:3]
    version = tuple(int(part) if part.isdigit() else 0 for part in parts)
    return _KNOWN[0] <= version < _KNOWN[1]


class Program(Generic[_P, _R]):
    """`jax.jit` of a function of (parameters, state, ...) with the options of its state.

    Inside of another program it is a part of it, and that one's options hold: JAX takes them
    for whole programs alone.
    """

    def __init__(self, function: Callable[_P, _R], **arguments: Any):
        functools.update_wrapper(self, function)
        self._plain = jax.jit(function, **arguments)
        self._with_options = jax.jit(function, compiler_options=OPTIONS, **arguments)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self._chosen(args, kwargs)(*args, **kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Lowered:
        """As of `jax.jit`: the program that a call would run."""
        return self._chosen(args, kwargs).lower(*args, **kwargs)

    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Traced:
        """As of `jax.jit`: the same before it is lowered."""
        return self._chosen(args, kwargs).trace(*args, **kwargs)

    def _chosen(self, args: tuple, kwargs: dict) -> Any:
        state = kwargs["state"] if "state" in kwargs else args[1]
        if isinstance(state.token, Tracer) or not options_for(state):
            return self._plain
        return self._with_options


def program(**arguments: Any) -> Callable[[Callable[_P, _R]], Program[_P, _R]]:
    """Decorates what is to be a `Program`.

    Args:
      arguments: of `jax.jit`.
    """
    return lambda function: Program(function, **arguments)
