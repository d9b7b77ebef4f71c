"""The decode loop on the device: steps until every request is done or a limit is reached."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.state import DecodeState, StepOutput
from sparse_loop_jax.decoding.steps import decode_step
from sparse_loop_jax.models.params import OuroParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBuffer:
    """Emitted tokens of each request, in order."""

    tokens: jax.Array  # int32 [B, capacity]
    count: jax.Array  # int32 [B]

    def append(self, output: StepOutput) -> TokenBuffer:
        """Adds the tokens of a step that count."""
        batch, rows = output.tokens.shape
        offsets = jnp.arange(rows, dtype=jnp.int32)[None]
        # Past the end is dropped, which is where tokens that do not count go.
        place = self.count[:, None] + offsets
        place = jnp.where(offsets < output.count[:, None], place, self.tokens.shape[1])
        index = (jnp.arange(batch, dtype=jnp.int32)[:, None], place)
        return TokenBuffer(
            tokens=self.tokens.at[index].set(output.tokens, mode="drop"),
            count=self.count + output.count,
        )


@functools.partial(jax.jit, donate_argnames=("state", "buffer"))
def decode_tokens(
    params: OuroParams, state: DecodeState, buffer: TokenBuffer, max_steps: jax.Array
) -> tuple[DecodeState, TokenBuffer]:
    """Runs `decode_step` while a request is live, at most `max_steps` (int32) times."""

    def unfinished(carry):
        step, state, _ = carry
        return (step < max_steps) & state.live.any()

    def body(carry):
        step, state, buffer = carry
        state, output = decode_step(params, state)
        return step + 1, state, buffer.append(output)

    _, state, buffer = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, buffer))
    return state, buffer
