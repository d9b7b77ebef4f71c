"""The weight dtypes of a checkpoint, and rounding from one to another."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WEIGHT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}

CAST_ELEMENTS = 2**20  # rounded at a time, so that temporaries stay small


def weight_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype of a name ("bfloat16") or of a NumPy or JAX dtype.

    Raises:
      ValueError: it is none of float32, bfloat16 and float16.
    """
    try:
        result = WEIGHT_DTYPES.get(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result not in WEIGHT_DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(WEIGHT_DTYPES)}, got {dtype!r}")
    return result


def cast_into(source: np.ndarray, target: np.ndarray, name: str) -> None:
    """Rounds `source` to nearest into `target`, an array of the same shape.

    Raises:
      ValueError: a finite value of `source` is beyond the range of the target's dtype;
        `name` says which tensor it was.
    """
    # "invalid": for bfloat16, NumPy warns of signalling NaNs, which are kept as NaNs.
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = source
        lost = np.isinf(target) & np.isfinite(source)
    if lost.any():
        value = float(source[lost][0])
        raise ValueError(
            f"tensor {name}: the value {value} is out of the range of {target.dtype}; "
            "choose bfloat16 or float32"
        )


def cast(source: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`source` itself where it already has `dtype`, else a rounded copy (see `cast_into`)."""
    if source.dtype == dtype:
        return source
    target = np.empty(source.shape, dtype)
    old, new = source.reshape(-1), target.reshape(-1)
    for begin in range(0, old.size, CAST_ELEMENTS):
        part = slice(begin, begin + CAST_ELEMENTS)
        cast_into(old[part], new[part], name)
    return target
