"""What the device says of its memory, and what a call wanted of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from sparse_loop_jax.checks import is_out_of_memory
from sparse_loop_jax.generation.setup import Plan


def peak_bytes() -> int | None:
    """Peak bytes in use of the first device since the process began; None if not known."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


@contextlib.contextmanager
def explain_exhaustion(plan: Plan) -> Iterator[None]:
    """Adds to an error for want of memory what the call had planned, and what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            kv, references = plan.bytes()
            knobs = ["max_new_tokens", "the number or the length of the prompts"]
            if plan.spec.speculative is not None:
                knobs.insert(0, "num_speculative_tokens")
            error.add_note(
                f"planned besides weights and temporaries: {kv:,} bytes of K/V pages and "
                f"{references:,} of sparse references; lower {' or '.join(knobs)}"
            )
        raise
