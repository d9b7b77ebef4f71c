"""Timing, the device's own bandwidth, and what a run was made on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Bytes a second that a plain copy is known to reach, by a part of the device's name.
KNOWN_BANDWIDTH = {"H200": 4.3e12}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, over repeats."""

    median: float
    least: float
    most: float

    @property
    def spread(self) -> float:
        """(most - least) / median."""
        return (self.most - self.least) / self.median


def time_calls(call: Callable[[], Any], *, repeats: int = 5, inner: int = 1) -> Timing:
    """Times `call`, which runs `inner` units of work and returns arrays to wait for.

    The first call, which may compile, is not counted.
    """
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append((time.perf_counter() - start) / inner)
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def copy_bandwidth(nbytes: int = 2 << 30) -> float:
    """Bytes read and written a second by a plain copy of `nbytes` on the default device."""
    if jax.default_backend() == "cpu":
        nbytes = min(nbytes, 64 << 20)  # a smoke run is not to take long
    source = jax.random.bits(jax.random.key(0), (nbytes // 4,), jnp.uint32)
    copy = jax.jit(jnp.copy)
    return 2 * nbytes / time_calls(lambda: copy(source), repeats=9).least


def bandwidth() -> float:
    """What fractions are taken of: the larger of the known figure and a measured copy."""
    name = jax.devices()[0].device_kind
    known = next((b for part, b in KNOWN_BANDWIDTH.items() if part in name), 0.0)
    return max(known, copy_bandwidth())


def setup_info() -> dict[str, str]:
    """Device and versions, for the head of a table."""
    device = jax.devices()[0]
    info = {
        "device": device.device_kind,
        "platform": f"{device.platform} ({device.client.platform_version.splitlines()[0]})",
        "python": platform.python_version(),
    }
    for package in ("jax", "jaxlib", "sparse-loop-jax", "torch", "triton"):
        try:
            info[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return info
