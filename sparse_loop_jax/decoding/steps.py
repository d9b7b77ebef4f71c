"""The jitted steps underneath `generate`: pure, donated, state in and state out."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.exits import start_exit_readout
from sparse_loop_jax.decoding.loops import Rows, run_loops
from sparse_loop_jax.decoding.sampling import choose_tokens
from sparse_loop_jax.decoding.state import DecodeState, StepOutput, emit
from sparse_loop_jax.models.layers import lm_logits
from sparse_loop_jax.models.params import OuroParams


@functools.partial(jax.jit, donate_argnames=("state",))
def prefill(
    params: OuroParams, state: DecodeState, tokens: jax.Array, valid: jax.Array, ends: jax.Array
) -> tuple[DecodeState, StepOutput]:
    """Runs the next chunk of each request's prompt through all loops.

    Args:
      tokens: int32 `[B, C]`; a chunk of each prompt, padded on the right.
      valid: int32 [B]; how many of the C tokens are prompt. 0 leaves a request as it is.
      ends: bool [B]; the chunk holds the prompt's last token, so a first token is emitted.

    Returns:
      The state, K/V written and positions moved, and the emitted tokens (`count` 0 or 1).
    """
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    rows = Rows(state.position[:, None] + offsets, offsets < valid[:, None])
    hidden, cache, readout = _run_all_loops(params, state, params.embed[tokens], rows)
    last = jnp.maximum(valid - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden if readout is None else readout, last, axis=1)[:, 0]
    state = dataclasses.replace(state, cache=cache, position=state.position + valid)
    return _emit_from(params, state, hidden, ends & (valid > 0) & state.live)


@functools.partial(jax.jit, donate_argnames=("state",))
def decode_step(params: OuroParams, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """Feeds each live request's token through all loops and emits the next one."""
    live = state.live
    rows = Rows(state.position[:, None], live[:, None])
    embedded = params.embed[state.token][:, None]
    hidden, cache, readout = _run_all_loops(params, state, embedded, rows)
    state = dataclasses.replace(state, cache=cache, position=state.position + live)
    return _emit_from(params, state, (hidden if readout is None else readout)[:, 0], live)


def _run_all_loops(params, state, hidden, rows):
    spec = state.spec
    readout = None
    if spec.early_exit:
        readout = start_exit_readout(hidden, state.request.exit_threshold)
    depths = range(spec.config.total_ut_steps)
    hidden, cache, readout = run_loops(params, spec, hidden, rows, state.cache, depths, readout)
    return hidden, cache, None if readout is None else readout.hidden


def _emit_from(params, state, hidden, live):
    """Reads `hidden [B, hidden]` out and emits one token of each live request."""
    logits = lm_logits(params, hidden)
    token = choose_tokens(logits, state.request, state.position, sampled=state.spec.sampled)
    output = StepOutput(tokens=token[:, None], count=live.astype(jnp.int32), logits=logits)
    return emit(state, token, live), output
