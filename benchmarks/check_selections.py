"""Checks of selections, for `check_sparse_kernels.py`."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from checking import Report

from sparse_loop_jax.kernels.select_keys import select_keys

RETENTIONS = (None, 0.1, 1.0)  # None: a single key
# Lengths of rows by the width of their table of scores: each layout, and each of its paths.
TABLES = {
    5: (5, 1),
    127: (127, 124),
    2048: (2048, 1030),
    8192: (8192, 5000),
    16384: (16384, 9217, 8200),
    32768: (32765,),
    40000: (40000,),
    65536: (65536, 32778),
}


def kept_count(length: int, retention: float | None) -> int:
    share = 1 if retention is None else math.ceil(length * retention)
    return min(length, max(1, share))


def sorted_selection(scores: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` largest: NaN last, equal ones by position."""
    missing = np.isnan(scores)
    order = np.lexsort((np.arange(len(scores)), -np.where(missing, 0, scores), missing))
    return np.sort(order[:count])


def awkward_rows(span: int) -> np.ndarray:
    """Rows of scores on which selections have gone wrong elsewhere."""
    rng = np.random.default_rng(span)
    rows = rng.standard_normal((14, span)).astype(np.float32)
    rows[1] = np.round(rows[1] * 2) / 2  # thousands of equal scores
    rows[2] = 1.0
    rows[3] = np.where(rows[3] > 0, 0.0, -0.0)
    rows[4, ::3] = np.nan
    rows[5, ::3] = -np.nan
    rows[6] = np.nan
    rows[7, ::2] = np.inf
    rows[8, 1::2] = -np.inf
    rows[9] = -65504 - np.abs(rows[9]) * 100
    rows[10] *= 1e-42  # denormal
    rows[11] *= 1e36
    rows[12] = np.arange(span)
    rows[13, 0] = 1e5  # one key far above the rest, as an attention sink is
    return rows


def check_selection(report: Report, implementation: str, span: int, lengths) -> None:
    rows = awkward_rows(span)
    for length in lengths:
        wrong = []
        for retention in RETENTIONS:
            count = kept_count(length, retention)
            out = select_keys(
                jnp.asarray(rows),
                jnp.full(len(rows), length, jnp.int32),
                jnp.full(len(rows), count, jnp.int32),
                capacity=span,
                implementation=implementation,
            )
            for i, (row, got) in enumerate(zip(rows, np.asarray(out), strict=True)):
                want = np.zeros(span, np.int64)
                want[:count] = sorted_selection(row[:length], count)
                if not np.array_equal(got, want):
                    wrong.append((i, count))
        report(f"select {length} of {span}", not wrong, f"row, count: {wrong[:5]}")
