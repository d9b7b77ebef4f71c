"""What the device says of its memory."""

from __future__ import annotations

import jax


def peak_bytes() -> int | None:
    """Peak bytes in use of the first device since the process began; None if not known."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
