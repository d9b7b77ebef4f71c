"""Lines on standard error about what a user may not have expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def note(text: str) -> None:
    print(f"sparse-loop: note: {text}", file=sys.stderr)


def note_slow_dtype(model, dtype: str | None) -> None:
    """Where float32 was not asked against, and would be many times as fast."""
    import jax

    if dtype is not None or model.dtype == "float32" or jax.default_backend() != "cpu":
        return
    if jax.__version_info__[:2] < (0, 11):  # XLA widens a whole cache to write to it
        note(f"{model.dtype} is slow on a CPU with this JAX: add --dtype float32")


def note_context_ends(
    counts: Sequence[int], reasons: Sequence[str], most: int, context: int
) -> None:
    """Where texts ended before their number of tokens because the context did."""
    short = [n for n, why in zip(counts, reasons, strict=True) if why == "length" and n < most]
    if short:
        note(
            f"{len(short)} of {len(counts)} texts ended at the model's context of {context} "
            f"tokens, after {min(short)} of {most} new ones"
        )
