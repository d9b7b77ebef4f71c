"""The decode loop on the device: steps until every request is done or a limit is reached."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.references import add_counters, no_counters
from sparse_loop_jax.decoding.speculative import speculative_step
from sparse_loop_jax.decoding.state import DecodeState, RoundCounters
from sparse_loop_jax.decoding.steps import decode_step
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.store import ReferenceLease


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBuffer:
    """Emitted tokens of each request, in order."""

    tokens: jax.Array  # int32 [B, capacity]
    count: jax.Array  # int32 [B]

    def append(self, tokens: jax.Array, count: jax.Array) -> TokenBuffer:
        """Adds the first `count` int32 [B] of each request's `tokens` int32 [B, n]."""
        batch, rows = tokens.shape
        offsets = jnp.arange(rows, dtype=jnp.int32)[None]
        # Past the end is dropped, which is where tokens that do not count go.
        place = self.count[:, None] + offsets
        place = jnp.where(offsets < count[:, None], place, self.tokens.shape[1])
        index = (jnp.arange(batch, dtype=jnp.int32)[:, None], place)
        return TokenBuffer(
            tokens=self.tokens.at[index].set(tokens, mode="drop"),
            count=self.count + count,
        )


@functools.partial(jax.jit, donate_argnames=("state", "buffer", "retire"))
def decode_tokens(
    params: OuroParams,
    state: DecodeState,
    buffer: TokenBuffer,
    retire: ReferenceLease,
    max_rounds: jax.Array,
) -> tuple[DecodeState, TokenBuffer, ReferenceLease, RoundCounters]:
    """Runs rounds while a request is live, at most `max_rounds` (int32).

    A round retires the one before it, so one lease is out at a time.

    Returns:
      The state, the buffer, the last round's lease, and the counters of these rounds. A
      refused reference ends the loop: without one it could go on for ever.
    """
    step = decode_step if state.spec.speculative is None else speculative_step

    def unfinished(carry):
        state, _, _, counters, done = carry
        return (done < max_rounds) & state.live.any() & (counters.refused == 0)

    def body(carry):
        state, buffer, retire, counters, done = carry
        state, output = step(params, state, retire)
        counters = add_counters(counters, output.counters)
        return (
            state,
            buffer.append(output.tokens, output.count),
            output.lease,
            counters,
            done + 1,
        )

    carry = (state, buffer, retire, no_counters(state), jnp.int32(0))
    return jax.lax.while_loop(unfinished, body, carry)[:4]
