"""The decode loop on the device: steps until every request is done or a limit is reached."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.compiling import program
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
    exit_loops: jax.Array | None  # int32 [B, capacity]; None where every loop is run

    def append(
        self, tokens: jax.Array, count: jax.Array, exit_loops: jax.Array | None
    ) -> TokenBuffer:
        """Adds the first `count` int32 [B] of each request's `tokens` int32 [B, n].

        `exit_loops` are of the same shape as the tokens.
        """
        batch, rows = tokens.shape
        offsets = jnp.arange(rows, dtype=jnp.int32)[None]
        # Past the end is dropped, which is where tokens that do not count go.
        place = self.count[:, None] + offsets
        place = jnp.where(offsets < count[:, None], place, self.tokens.shape[1])
        index = (jnp.arange(batch, dtype=jnp.int32)[:, None], place)
        loops = self.exit_loops
        if loops is not None and exit_loops is not None:
            loops = loops.at[index].set(exit_loops, mode="drop")
        return TokenBuffer(
            tokens=self.tokens.at[index].set(tokens, mode="drop"),
            count=self.count + count,
            exit_loops=loops,
        )

    def lists(self, requests: int, loops: int) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and exit loops of the first so many requests; of a buffer on the host.

        Args:
          loops: of the model: what a token is taken from where none leaves early.
        """
        counts = self.count[:requests].tolist()
        tokens = [self.tokens[i, :n].tolist() for i, n in enumerate(counts)]
        if self.exit_loops is None:
            return tokens, [[loops] * n for n in counts]
        return tokens, [self.exit_loops[i, :n].tolist() for i, n in enumerate(counts)]


def empty_buffer(state: DecodeState, capacity: int) -> TokenBuffer:
    """Room for so many tokens of each of the state's requests."""
    batch = state.token.shape[0]
    zeros = jnp.zeros((batch, capacity), jnp.int32)
    return TokenBuffer(
        tokens=zeros,
        count=jnp.zeros((batch,), jnp.int32),
        exit_loops=jnp.zeros_like(zeros) if state.spec.early_exit else None,
    )


@program(donate_argnames=("state", "buffer", "retire"))
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
            buffer.append(output.tokens, output.count, output.exit_loops),
            output.lease,
            counters,
            done + 1,
        )

    carry = (state, buffer, retire, no_counters(state), jnp.int32(0))
    return jax.lax.while_loop(unfinished, body, carry)[:4]
