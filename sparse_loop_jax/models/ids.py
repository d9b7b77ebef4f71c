"""Token ids as a caller passes them, checked on the host before anything is compiled."""

from __future__ import annotations

import numpy as np


def id_array(values, name: str) -> np.ndarray:
    """The values as NumPy takes them; `name` is for complaints.

    Raises:
      ValueError: they are lists of different lengths.
    """
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} has lists of different lengths inside") from None


def within_vocabulary(ids: np.ndarray, size: int, name: str) -> np.ndarray:
    """Integers of any width as int32, which a wider id would wrap around in.

    Raises:
      ValueError: one of them is outside `[0, size)`.
    """
    outside = (ids < 0) | (ids >= size)
    if outside.any():
        raise ValueError(
            f"{name} has token id {ids[outside][0]}, outside the vocabulary of {size}"
        )
    return ids.astype(np.int32)
