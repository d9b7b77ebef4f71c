"""Timing of an op by many calls in one program, each waiting for the one before.

A call's result is part of the next call's arguments, so that no two calls run side by side.
The calls go through as many distinct pages as it takes for a cache to be of no use, and the
whole chain is one program in a loop of known length: what the host does is not in the time.
Nothing is subtracted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from sparse_loop_jax.bench.measure import Timing, time_calls

# Distinct bytes that a chain should go through: several times the L2 cache of an H200.
COLD_BYTES = 256 << 20
# Buffers of a chain at most. What is so small that 32 of it fit a cache is not read for long.
MAX_SETS = 32
# Calls of one turn of the loop at least: its own cost, a few microseconds, is spread.
MIN_CALLS = 8


def sets_for(nbytes: int, least: int = 1) -> int:
    """Distinct buffers for calls that read `nbytes` each."""
    if jax.default_backend() == "cpu":
        return least  # nothing is learned from a slow smoke run
    return min(max(-(-COLD_BYTES // max(nbytes, 1)), least), MAX_SETS)


class Chain(NamedTuple):
    """Calls to be timed.

    Attributes:
      step: `(carry, shared, item) -> carry`, one call; the carry keeps its shapes.
      carry: the first call's.
      shared: a pytree of arrays that every call gets.
      items: a pytree of arrays for each call, in turn.
      nbytes: of memory that a call reads, for the number of calls.
    """

    step: Callable[[Any, Any, Any], Any]
    carry: Any
    shared: Any
    items: Sequence[Any]
    nbytes: int

    def calls(self) -> int:
        """Calls in one turn of the loop."""
        least = 1 if jax.default_backend() == "cpu" else MIN_CALLS
        return len(self.items) * -(-least // len(self.items))

    def rounds(self, seconds: float) -> int:
        """Turns of the loop that take about `seconds`."""
        if jax.default_backend() == "cpu":
            return 1
        guess = self.calls() * (self.nbytes / 3e12 + 10e-6)
        return min(max(int(seconds / guess), 1), 5000)

    def lower(self, seconds: float) -> jax.stages.Lowered:
        """The program, of about `seconds`."""
        repeats = self.calls() // len(self.items)

        def turn(_, carry, shared, items):
            for item in items * repeats:
                carry = self.step(carry, shared, item)
            return carry

        def chain(carry, shared, items):
            body = functools.partial(turn, shared=shared, items=items)
            return jax.lax.fori_loop(0, self.rounds(seconds), body, carry)

        return jax.jit(chain).lower(self.carry, self.shared, tuple(self.items))

    def time(
        self, compiled: jax.stages.Compiled | None = None, *, seconds: float, repeats: int
    ) -> Timing:
        """Seconds of one call; `compiled` is what `lower(seconds)` gave, compiled."""
        compiled = compiled or self.lower(seconds).compile()
        args = self.carry, self.shared, tuple(self.items)
        return time_calls(
            lambda: compiled(*args),
            repeats=repeats,
            inner=self.calls() * self.rounds(seconds),
        )
