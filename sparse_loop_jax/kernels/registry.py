"""Ops with interchangeable implementations.

An op is a name, an argument contract (the docstring of its `xla` implementation, which is
the reference and ships as such) and implementations of that contract. An implementation
that cannot serve some arguments raises `NotImplementedError`, and the next one in the
order of the platform is asked; `ValueError` means that the arguments are wrong. An
implementation asked for by name is used or the call fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# What `implementation=None` asks, in order, by platform.
PREFERENCE = {"gpu": ("pallas", "xla"), "cpu": ("xla",)}


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
            return self.get(implementation)(*args, **kwargs)
        reasons = []
        for name in PREFERENCE.get(jax.default_backend(), ("xla",)):
            if name not in self.implementations:
                continue
            try:
                return self.implementations[name](*args, **kwargs)
            except NotImplementedError as error:
                reasons.append(f"{name}: {error}")
        raise NotImplementedError(f"no implementation of {self.name} can serve: {reasons}")

    def get(self, name: str) -> Callable[..., Any]:
        """The implementation called `name`.

        Raises:
          ValueError: there is none; the message lists the names that exist.
        """
        if name not in self.implementations:
            known = ", ".join(sorted(self.implementations))
            raise ValueError(f"{self.name} has no implementation {name!r}; it has: {known}")
        return self.implementations[name]
