"""Ops with interchangeable implementations.

An op is a name, an argument contract (the docstring of its `xla` implementation, which is
the reference and ships as such) and implementations of that contract. An implementation
that cannot serve some arguments raises `NotImplementedError`, and the next one in the
order of the platform is asked; `ValueError` means that the arguments are wrong. An
implementation asked for by name is used or the call fails.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

# What `implementation=None` asks, in order, by platform.
PREFERENCE = {"gpu": ("mosaic", "pallas", "triton", "xla"), "cpu": ("xla",)}


# Filled by the ops that are called while `recording` is open.
_record: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "_record", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, str]]:
    """Collects which implementation served each op, by the op's name, while it is open."""
    served: dict[str, str] = {}
    token = _record.set(served)
    try:
        yield served
    finally:
        _record.reset(token)


class Op:
    """A named op; calling it runs the chosen implementation."""

    def __init__(self, name: str):
        self.name = name
        self.implementations: dict[str, Callable[..., Any]] = {}

    def register(self, name: str):
        """Decorator that adds an implementation under `name`."""

        def add(function):
            if name in self.implementations:
                raise ValueError(f"{self.name} already has an implementation {name!r}")
            self.implementations[name] = function
            return function

        return add

    def __call__(self, *args, implementation: str | None = None, **kwargs):
        """Runs `implementation`, or the first of the platform's order that can serve.

        Raises:
          ValueError: no implementation has that name.
          NotImplementedError: the named one, or every one of the order, cannot serve these
            arguments; the message holds each reason.
        """
        if implementation is not None:
            return self._run(implementation, self.get(implementation), args, kwargs)
        reasons = []
        for name in PREFERENCE.get(jax.default_backend(), ("xla",)):
            if name not in self.implementations:
                continue
            try:
                return self._run(name, self.implementations[name], args, kwargs)
            except NotImplementedError as error:
                reasons.append(f"{name}: {error}")
        raise NotImplementedError(f"no implementation of {self.name} can serve: {reasons}")

    def _run(self, name: str, function: Callable[..., Any], args, kwargs):
        result = function(*args, **kwargs)
        served = _record.get()
        if served is not None:
            served[self.name] = name
        return result

    def get(self, name: str) -> Callable[..., Any]:
        """The implementation called `name`.

        Raises:
          ValueError: there is none; the message lists the names that exist.
        """
        if name not in self.implementations:
            known = ", ".join(sorted(self.implementations))
            raise ValueError(
                f"implementation must be one of {self.name}'s, {known}: got {name!r}"
            )
        return self.implementations[name]
