"""Everything a step carries: one frozen pytree, with what is static as its metadata."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.cache import PagedKVCache
from sparse_loop_jax.decoding.adaptive import DraftHistory
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.sparse.store import ReferenceLease, SparseDecodeReferenceStore


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestParams:
    """What each request asked for; arrays, so that other values do not recompile."""

    temperature: jax.Array  # float32 [B]; 0 is greedy
    top_k: jax.Array  # int32 [B]; the vocabulary's size keeps all
    top_p: jax.Array  # float32 [B]; 1 keeps all
    exit_threshold: jax.Array  # float32 [B]; 1 never leaves early
    min_loops: jax.Array  # int32 [B]; at least so many loops
    max_loops: jax.Array  # int32 [B]; at most so many, whatever the threshold
    stop_ids: jax.Array  # int32 [B, S], padded with -1, which is no token
    key: jax.Array  # PRNG key [B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of requests between two steps. Donate it: its pools are updated in place."""

    cache: PagedKVCache
    request: RequestParams
    token: jax.Array  # int32 [B], the next input
    position: jax.Array  # int32 [B], where it goes: the tokens that K/V hold already
    remaining: jax.Array  # int32 [B], tokens that may still be emitted
    stopped: jax.Array  # bool [B], a stop token was emitted
    # Sparse decode only: the reference store, and k by N, int32 [context + 1].
    store: SparseDecodeReferenceStore | None
    key_counts: jax.Array | None
    history: DraftHistory | None  # adaptive speculation only
    spec: DecodeSpec = dataclasses.field(metadata={"static": True})

    @property
    def live(self) -> jax.Array:
        """Requests that still emit, bool [B]."""
        return ~self.stopped & (self.remaining > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundCounters:
    """What a round did, summed over its requests; the device adds rounds up."""

    rounds: jax.Array  # int32 []; 1 if a request was live
    drafted: jax.Array  # int32 [K]; tokens offered, by place in the round
    accepted: jax.Array  # int32 [K]; of them, those that stood and were emitted
    emitted: jax.Array  # int32 []
    refused: jax.Array  # int32 []; requests that emitted nothing for a refused reference
    sparse: SparseCounters | None
    # int32 []; loops that every row had left before. None where rounds run every loop.
    loops_skipped: jax.Array | None = None

    def loops(self, spec: DecodeSpec) -> tuple[int, int]:
        """Loops run and skipped, of counters on the host; both 0 with speculation.

        There, loops of drafts and of verifications are passes over different rows.
        """
        if spec.speculative is not None:
            return 0, 0
        skipped = 0 if self.loops_skipped is None else int(self.loops_skipped)
        return int(self.rounds) * spec.config.total_ut_steps - skipped, skipped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseCounters:
    """Sparse attention of a round's rows; sums over rows, layers and loops where not said."""

    captured: jax.Array  # int32 []; (row, layer, loop) that captured
    consumed: jax.Array  # int32 []; (row, layer, loop) that consumed
    keys_read: jax.Array  # float32 []; keys a head attended to, over (row, loop)
    keys_dense: jax.Array  # float32 []; keys dense attention would have
    mass_sum: jax.Array  # float32 [layers]; retained mass, mean over heads, emitted rows
    mass_min: jax.Array  # float32 [layers]; the least of a head
    mass_rows: jax.Array  # int32 []; rows in mass_sum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundOutput:
    """What a step emitted; on the device until someone asks."""

    tokens: jax.Array  # int32 [B, n]
    count: jax.Array  # int32 [B]; the first so many were emitted
    logits: jax.Array  # float32 [B, n, vocab]; row j's choose token j
    lease: ReferenceLease  # of the round's references; retire it when done
    counters: RoundCounters
    # int32 [B, n]; loops whose state chose the token, 1-based. None: all of them.
    exit_loops: jax.Array | None = None


def emit(
    state: DecodeState, tokens: jax.Array, wanted: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Emits the first `wanted` int32 [B] of each request's `tokens` int32 [B, n].

    A stop token ends a request there. The state moves on to the last emitted token, whose
    K/V is not written yet.

    Returns:
      The state and how many tokens were emitted, int32 [B].
    """
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    stops = (tokens[..., None] == state.request.stop_ids[:, None]).any(axis=-1)
    stops &= offsets < wanted[:, None]
    stopped = stops.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, wanted)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        token=jnp.where(count > 0, last, state.token),
        remaining=state.remaining - count,
        stopped=state.stopped | stopped,
    )
    return state, count
