"""The jitted steps underneath `generate`: pure, donated, state in and state out."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.exits import start_exit_readout
from sparse_loop_jax.decoding.loops import Rows, run_loops
from sparse_loop_jax.decoding.sampling import choose_tokens
from sparse_loop_jax.decoding.state import DecodeState, RoundOutput, emit
from sparse_loop_jax.models.layers import lm_logits
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.store import ReferenceLease


def prefill(
    params: OuroParams, state: DecodeState, tokens: jax.Array, valid: jax.Array, ends: jax.Array
) -> tuple[DecodeState, RoundOutput]:
    """Runs the next chunk of each request's prompt through all loops, dense.

    A prompt is run the same way whatever decodes after it, so the program (jitted, `state`
    donated) is compiled once for dense, sparse and speculative states alike.

    Args:
      tokens: int32 `[B, C]`; a chunk of each prompt, padded on the right.
      valid: int32 [B]; how many of the C tokens are prompt. 0 leaves a request as it is.
      ends: bool [B]; the chunk holds the prompt's last token, so a first token is emitted.

    Returns:
      The state, K/V written and positions moved, and the emitted tokens (`count` 0 or 1).
    """
    plain = dataclasses.replace(
        state,
        store=None,
        key_counts=None,
        history=None,
        spec=dataclasses.replace(state.spec, sparse=None, speculative=None),
    )
    plain, output = _prefill(params, plain, tokens, valid, ends)
    state = dataclasses.replace(
        plain,
        store=state.store,
        key_counts=state.key_counts,
        history=state.history,
        spec=state.spec,
    )
    return state, output


@functools.partial(jax.jit, donate_argnames=("state",))
def _prefill(params, state, tokens, valid, ends):
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    rows = Rows(state.position[:, None] + offsets, offsets < valid[:, None])
    embedded = params.embed[tokens]
    done = run_loops(
        params,
        state.spec,
        embedded,
        rows,
        state.cache,
        range(state.spec.config.total_ut_steps),
        readout=_readout(state, embedded),
        products="xla",  # whose matrix products are made for many rows
    )
    hidden = done.hidden if done.readout is None else done.readout.hidden
    last = jnp.maximum(valid - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)
    state = dataclasses.replace(state, cache=done.cache, position=state.position + valid)
    logits, token = _read_out(params, state, hidden, state.position)
    state, count = emit(state, token, (ends & (valid > 0) & state.live).astype(jnp.int32))
    return state, RoundOutput(
        tokens=token,
        count=count,
        logits=logits,
        lease=references.no_lease(state),
        counters=references.no_counters(state),
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def decode_step(
    params: OuroParams, state: DecodeState, retire: ReferenceLease
) -> tuple[DecodeState, RoundOutput]:
    """Feeds each live request's token through all loops and emits the next one.

    Args:
      params: the weights.
      state: donated.
      retire: the lease of a round whose output has been dealt with; its slots are freed.
        `no_lease(state)` where there is none.

    Returns:
      The state, and the round's tokens `[B, 1]`, counts, logits and lease.
    """
    round_ = references.open_round(state, retire, state.live.astype(jnp.int32))
    embedded = params.embed[state.token][:, None]
    done = run_loops(
        params,
        state.spec,
        embedded,
        Rows(state.position[:, None], (round_.rows > 0)[:, None]),
        state.cache,
        range(state.spec.config.total_ut_steps),
        sparse=round_.sparse,
        readout=_readout(state, embedded),
    )
    hidden = done.hidden if done.readout is None else done.readout.hidden
    logits, token = _read_out(params, state, hidden, state.position + 1)
    state = dataclasses.replace(state, cache=done.cache)
    accepted = jnp.zeros_like(round_.rows)
    return references.close_round(state, round_, done.sparse, token, accepted, logits)


def _readout(state: DecodeState, hidden: jax.Array):
    if not state.spec.early_exit:
        return None
    return start_exit_readout(hidden, state.request.exit_threshold)


def _read_out(params: OuroParams, state: DecodeState, hidden: jax.Array, place: jax.Array):
    """Logits `[B, 1, vocab]` and the chosen token `[B, 1]` of states `[B, 1, hidden]`."""
    logits = lm_logits(params, hidden)
    token = choose_tokens(logits[:, 0], state.request, place, sampled=state.spec.sampled)
    return logits, token[:, None]
