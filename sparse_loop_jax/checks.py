"""What counts as a number where a caller passes one, and as a want of memory.

Numbers are Python's and NumPy's, but no bool.
"""

from __future__ import annotations

import numpy as np


def is_int(value) -> bool:
    """An integer, NumPy's among them, but no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value) -> bool:
    """An integer or a float, NumPy's among them, but no bool."""
    return is_int(value) or isinstance(value, float | np.floating)


def plain_int(name: str, value, least: int) -> int:
    """The value as Python's int.

    Raises:
      ValueError: it is no integer, or below `least`.
    """
    if not is_int(value) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return int(value)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host's or the device's memory was too small, by what JAX's errors say."""
    signs = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def plain_float(value) -> float:
    """A number as Python's float: of narrower ones, the shortest decimal that they print.

    `float(np.float32(0.1))` would be 0.10000000149, and a tenth of 100 keys 11 of them.
    """
    return float(str(value)) if isinstance(value, np.floating) else float(value)
