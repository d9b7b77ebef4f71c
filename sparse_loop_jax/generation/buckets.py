"""Sizes rounded up to a few buckets, so that other prompts find compiled programs.

Every static shape of a call comes from here. Rows, pages and buffer places beyond what a
call needs are dead: they cost little and change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparse_loop_jax.cache import pages_for
from sparse_loop_jax.generation.inputs import Request

# Chunk lengths of a prefill. Two to four apart: padding costs less than more programs would.
CHUNKS = (32, 128, 256, 512, 2048)
# Prompt tokens of a batch that go through the layers at once; bounds the temporaries.
MAX_CHUNK_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static shapes of one `generate` call."""

    batch: int
    max_pages: int  # per (request, loop)
    num_pages: int  # per layer, all loops and requests
    max_new_tokens: int  # places of the output buffer
    stop_ids: int


def sizes_for(requests: Sequence[Request], loops: int, page_size: int) -> Sizes:
    """The buckets that hold these requests."""
    pages = [pages_for(r.kv_tokens, page_size) for r in requests]
    return Sizes(
        batch=power_of_two(len(requests)),
        max_pages=power_of_two(max(pages)),
        num_pages=quarter_octave(sum(pages) * loops),
        max_new_tokens=power_of_two(max(16, *(r.max_new_tokens for r in requests))),
        stop_ids=power_of_two(max(1, *(len(r.stop_ids) for r in requests))),
    )


def chunk_length(longest: int, batch: int) -> int:
    """Tokens of the next prefill chunk, for `longest` prompt tokens still to run."""
    fitting = [c for c in CHUNKS if c * batch <= MAX_CHUNK_TOKENS] or [CHUNKS[0]]
    return next((c for c in fitting if c >= longest), fitting[-1])


def power_of_two(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def quarter_octave(n: int) -> int:
    """The least of {4, 5, 6, 7} * 2^i that is not below n: at most a quarter too large."""
    shift = max(0, (n - 1).bit_length() - 3)
    return max(4, -(-n // (1 << shift)) << shift)
