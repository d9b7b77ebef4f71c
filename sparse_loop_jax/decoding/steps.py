"""The jitted steps underneath `generate`: pure, donated, state in and state out."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.compiling import program
from sparse_loop_jax.decoding.exits import start_exit_readout
from sparse_loop_jax.decoding.loops import Rows, run_loops, run_until_left
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

    All loops are run; where tokens may leave early, the first token is chosen from the
    state of the loop at which the prompt's last one would leave.

    Returns:
      The state, K/V written and positions moved, and the emitted tokens (`count` 0 or 1).
    """
    plain = dataclasses.replace(
        state,
        store=None,
        key_counts=None,
        history=None,
        spec=state.spec.of_prompts,
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
    readout = None
    if state.spec.early_exit:
        readout = start_exit_readout(embedded, rows.live, state.request)
    done = run_loops(
        params,
        state.spec,
        embedded,
        rows,
        state.cache,
        range(state.spec.config.total_ut_steps),
        readout=readout,
        prompt=True,
    )
    last = jnp.maximum(valid - 1, 0)[:, None]
    hidden, exit_loops = done.hidden, None
    if done.readout is not None:
        hidden = done.readout.hidden
        exit_loops = jnp.take_along_axis(done.readout.loop + 1, last, axis=1)
    hidden = jnp.take_along_axis(hidden, last[..., None], axis=1)
    state = dataclasses.replace(state, cache=done.cache, position=state.position + valid)
    logits, token = _read_out(params, state, hidden, state.position)
    state, count = emit(state, token, (ends & (valid > 0) & state.live).astype(jnp.int32))
    return state, RoundOutput(
        tokens=token,
        count=count,
        logits=logits,
        lease=references.no_lease(state),
        counters=references.no_counters(state),
        exit_loops=exit_loops,
    )


@program(donate_argnames=("state",))
def decode_step(
    params: OuroParams, state: DecodeState, retire: ReferenceLease
) -> tuple[DecodeState, RoundOutput]:
    """Feeds each live request's token through the loops and emits the next one.

    Through all of them, unless the spec has `early_exit`: then each row leaves by its
    request's rule, and the loops end when the last row has left.

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
    rows = Rows(state.position[:, None], (round_.rows > 0)[:, None])
    if state.spec.early_exit:
        return _decode_until_left(params, state, round_, embedded, rows)
    done = run_loops(
        params,
        state.spec,
        embedded,
        rows,
        state.cache,
        range(state.spec.config.total_ut_steps),
        sparse=round_.sparse,
    )
    logits, token = _read_out(params, state, done.hidden, state.position + 1)
    state = dataclasses.replace(state, cache=done.cache)
    accepted = jnp.zeros_like(round_.rows)
    return references.close_round(state, round_, done.sparse, token, accepted, logits)


def _decode_until_left(params, state: DecodeState, round_, embedded: jax.Array, rows: Rows):
    """The rest of `decode_step` where rows may leave: another program, of dense attention."""
    readout = start_exit_readout(embedded, rows.live, state.request)
    cache, readout, run = run_until_left(
        params, state.spec, embedded, rows, state.cache, readout
    )
    logits, token = _read_out(params, state, readout.hidden, state.position + 1)
    state = dataclasses.replace(state, cache=cache)
    accepted = jnp.zeros_like(round_.rows)
    state, output = references.close_round(state, round_, None, token, accepted, logits)
    counters = output.counters
    skipped = counters.rounds * state.spec.config.total_ut_steps - run
    return state, dataclasses.replace(
        output,
        counters=dataclasses.replace(counters, loops_skipped=skipped),
        exit_loops=readout.loop + 1,
    )


def _read_out(params: OuroParams, state: DecodeState, hidden: jax.Array, place: jax.Array):
    """Logits `[B, 1, vocab]` and the chosen token `[B, 1]` of states `[B, 1, hidden]`."""
    logits = lm_logits(params, hidden)
    token = choose_tokens(logits[:, 0], state.request, place, sampled=state.spec.sampled)
    return logits, token[:, None]
