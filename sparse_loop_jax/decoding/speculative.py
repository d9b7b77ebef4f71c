"""One round of self-speculation: draft, verify, accept, move on; nothing waits for the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.acceptance import accept_greedy, accept_sampled, draft_tokens
from sparse_loop_jax.decoding.compiling import program
from sparse_loop_jax.decoding.config import SpeculativeConfig
from sparse_loop_jax.decoding.loops import Rows, run_loops
from sparse_loop_jax.decoding.state import DecodeState, RoundOutput
from sparse_loop_jax.models.layers import lm_logits
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.store import ReferenceLease


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Draft:
    """What the draft leaves for the verification; row i of K + 1 at position s + i."""

    token: jax.Array  # int32 [B], the input of the next row
    hidden: jax.Array  # [B, K + 1, hidden], state after the draft loops
    candidates: jax.Array  # int32 [B, K]
    probabilities: jax.Array  # float32 [B, K, vocab]; [B, K, 0] when greedy


@dataclasses.dataclass(frozen=True)
class RoundHooks:
    """Replaces parts of a round, for tests and benchmarks. Static.

    Attributes:
      candidate: (candidates int32 [B], row index) -> candidates; edits what was drafted.
      accepted: (accepted int32 [B], rows int32 [B]) -> accepted; overrules the judgement.
    """

    candidate: Callable[[Any, Any], Any] | None = None
    accepted: Callable[[Any, Any], Any] | None = None


@program(donate_argnames=("state",), static_argnames=("hooks",))
def speculative_step(
    params: OuroParams,
    state: DecodeState,
    retire: ReferenceLease,
    hooks: RoundHooks = RoundHooks(),
) -> tuple[DecodeState, RoundOutput]:
    """Drafts K tokens with the first loops, verifies them with the rest, and emits.

    A request at position s gets n rows: K + 1, or what its limit leaves. Row i holds the
    token at s + i; the draft runs loops 0..d-1 of one row after the other and keeps their
    states and K/V; the verification runs loops d..D-1 of all rows at once. Each (row, loop)
    is computed once. The accepted tokens and one more are emitted; K/V beyond the new
    position is garbage that lengths exclude and the next round overwrites.

    Args:
      params: the weights.
      state: with a `SpeculativeConfig` in its spec; donated.
      retire: the lease of a round whose output has been dealt with; its slots are freed.
        `references.no_lease(state)` where there is none.

    Returns:
      The state, and the round's tokens, counts and lease.
    """
    spec = state.spec
    speculative = spec.speculative
    if speculative is None:
        raise ValueError("speculative_step needs a state made with a SpeculativeConfig")
    loops, drafting = spec.config.total_ut_steps, speculative.draft_loops
    width = speculative.rows

    wanted = jnp.where(
        state.live, jnp.minimum(_rows_wanted(state, speculative), state.remaining), 0
    )
    round_ = references.open_round(state, retire, wanted)
    rows = round_.rows
    offsets = jnp.arange(width, dtype=jnp.int32)[None]

    def draft_row(i, carry):
        draft, cache, sparse = carry
        done = run_loops(
            params,
            spec,
            params.embed[draft.token][:, None],
            Rows(state.position[:, None] + i, (i < rows)[:, None]),
            cache,
            range(drafting),
            sparse=references.column(sparse, i),
        )
        sparse = references.with_plan(done.sparse, round_.sparse)
        draft = dataclasses.replace(draft, hidden=_put(draft.hidden, done.hidden[:, 0], i))
        return draft, done.cache, sparse

    def draft_and_propose(i, carry):
        draft, cache, sparse = draft_row(i, carry)
        hidden = jax.lax.dynamic_index_in_dim(draft.hidden, i, axis=1, keepdims=False)
        return propose(draft, hidden, i), cache, sparse

    def propose(draft, hidden, i):
        logits = lm_logits(params, hidden)
        if spec.sampled:
            token, q = draft_tokens(logits, state.request, state.position + i + 1)
            draft = dataclasses.replace(draft, probabilities=_put(draft.probabilities, q, i))
        else:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if hooks.candidate is not None:
            token = hooks.candidate(token, i)
        return dataclasses.replace(
            draft, token=token, candidates=_put(draft.candidates, token, i)
        )

    # A loop whose length is data makes the host wait for each of its turns. It is worth that
    # only where requests choose how many tokens they draft.
    last = jnp.maximum(jnp.max(rows), 1) - 1 if speculative.adaptive else width - 1
    carry = (_empty_draft(params, state, width), state.cache, round_.sparse)
    carry = jax.lax.fori_loop(0, last, draft_and_propose, carry)
    # The last row has no candidate to give: it is there for the bonus token.
    draft, cache, sparse = draft_row(last, carry)
    done = run_loops(
        params,
        spec,
        draft.hidden,
        Rows(state.position[:, None] + offsets, offsets < rows[:, None]),
        cache,
        range(drafting, loops),
        sparse=sparse,
    )
    logits = lm_logits(params, done.hidden)
    accepted, tokens = _judge(state, draft, logits, rows)
    if hooks.accepted is not None:
        accepted = hooks.accepted(accepted, rows)
    state = dataclasses.replace(state, cache=done.cache)
    return references.close_round(state, round_, done.sparse, tokens, accepted, logits)


def _rows_wanted(state: DecodeState, speculative: SpeculativeConfig) -> jax.Array:
    """Rows that each request would like, before its limit: int32 [B]."""
    if state.history is None:
        return jnp.full_like(state.remaining, speculative.rows)
    share = speculative.draft_loops / state.spec.config.total_ut_steps
    return 1 + state.history.best_length(speculative.num_speculative_tokens, share)


def _empty_draft(params: OuroParams, state: DecodeState, width: int) -> _Draft:
    batch = state.token.shape[0]
    vocab, hidden = params.embed.shape
    drawn_from = vocab if state.spec.sampled else 0
    return _Draft(
        token=state.token,
        hidden=jnp.zeros((batch, width, hidden), params.embed.dtype),
        candidates=jnp.zeros((batch, width - 1), jnp.int32),
        probabilities=jnp.zeros((batch, width - 1, drawn_from), jnp.float32),
    )


def _judge(state: DecodeState, draft: _Draft, logits: jax.Array, rows: jax.Array):
    if not state.spec.sampled:
        return accept_greedy(draft.candidates, logits, rows)
    return accept_sampled(
        draft.candidates, draft.probabilities, logits, rows, state.request, state.position
    )


def _put(array: jax.Array, value: jax.Array, i) -> jax.Array:
    """`array` with column i (axis 1) set to `value`."""
    return jax.lax.dynamic_update_slice_in_dim(array, value[:, None], i, axis=1)
