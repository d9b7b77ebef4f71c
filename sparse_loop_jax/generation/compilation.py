"""What JAX compiled, and for how long, while a block of code ran; and time without it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import jax

# Fired for every program that the backend is asked for.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """Filled while the context of `count_compilations` is open."""

    programs: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts programs that this thread compiles through JAX's own events.

    What other threads compile meanwhile is not counted: it is no part of this one's time.
    """
    counted, thread = Compilations(), threading.get_ident()

    def listen(event: str, duration_secs: float, **_: object):
        if event == _COMPILE_EVENT and threading.get_ident() == thread:
            counted.programs += 1
            counted.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counted
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Clock:
    """Wall seconds between laps, less what JAX spent compiling."""

    def __init__(self, compiled: Compilations):
        self._compiled = compiled
        self._at = time.perf_counter()
        self._compiling = compiled.seconds

    def lap(self) -> float:
        now, compiling = time.perf_counter(), self._compiled.seconds
        seconds = (now - self._at) - (compiling - self._compiling)
        self._at, self._compiling = now, compiling
        return max(seconds, 0.0)
