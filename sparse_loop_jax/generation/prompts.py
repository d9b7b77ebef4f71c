"""Prompts through the cache, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.decoding.state import DecodeState
from sparse_loop_jax.decoding.steps import prefill
from sparse_loop_jax.generation.buckets import chunk_length
from sparse_loop_jax.generation.inputs import Request
from sparse_loop_jax.models.params import OuroParams

# Tokens int32 [B, 1], counts int32 [B], and the exit loops as in `RoundOutput`.
Emitted = tuple[jax.Array, jax.Array, jax.Array | None]


def run_prompts(
    params: OuroParams,
    state: DecodeState,
    requests: Sequence[Request],
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> tuple[DecodeState, list[Emitted]]:
    """Prefills every prompt; each emits its first token with its last chunk.

    Args:
      state: fresh, at least as many places as requests; donated.
      on_chunk: told how many prompt tokens have been submitted, after each chunk.

    Returns:
      The state, and for each chunk what it emitted, on the device.
    """
    batch = state.token.shape[0]
    lengths = np.zeros(batch, np.int64)
    lengths[: len(requests)] = [len(r.prompt) for r in requests]
    done = np.zeros(batch, np.int64)
    emitted = []
    while (done < lengths).any():
        chunk = chunk_length(int((lengths - done).max()), batch)
        valid = np.minimum(lengths - done, chunk)
        tokens = np.zeros((batch, chunk), np.int32)
        for row, request in enumerate(requests):
            tokens[row, : valid[row]] = request.prompt[done[row] : done[row] + valid[row]]
        ends = (valid > 0) & (done + valid == lengths)
        state, output = prefill(
            params, state, jnp.asarray(tokens), jnp.asarray(valid, jnp.int32), jnp.asarray(ends)
        )
        emitted.append((output.tokens, output.count, output.exit_loops))
        done += valid
        on_chunk(int(valid.sum()))
    return state, emitted
