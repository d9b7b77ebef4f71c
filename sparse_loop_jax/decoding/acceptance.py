"""Which drafted tokens stand, and which token follows them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.sampling import filtered_logits
from sparse_loop_jax.decoding.state import RequestParams

# A drafted token, the coin that judges it and the token drawn in its place use the same
# place in the text, so each has its own stream.
_DRAFT, _COIN, _RESIDUAL = 0, 1, 2


def accept_greedy(
    candidates: jax.Array, logits: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts the drafted tokens that equal the targets, up to the first that does not.

    Args:
      candidates: int32 `[B, K]`; candidate j was drafted from row j.
      logits: float32 `[B, K + 1, vocab]` of the verified rows.
      rows: int32 [B]; rows of each request, so `rows - 1` candidates were offered.

    Returns:
      `accepted` int32 [B] and tokens int32 `[B, K + 1]`, of which the first accepted + 1
      are emitted: the accepted ones and the correction, or the bonus if all were.
    """
    targets = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    agrees = candidates == targets[:, :-1]
    return _prefix_length(agrees, rows), targets


def accept_sampled(
    candidates: jax.Array,
    draft_probabilities: jax.Array,
    logits: jax.Array,
    rows: jax.Array,
    request: RequestParams,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Exact rejection sampling: what is emitted is distributed as the target's own draws.

    Candidate x of row j stands with probability min(1, p(x) / q(x)); at the first that does
    not, the token comes from max(p - q, 0), normalised; after the last row, from p
    (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). p and q are the
    filtered distributions: a temperature of 0 makes this `accept_greedy`.

    Args:
      draft_probabilities: float32 `[B, K, vocab]`, what each candidate was drawn from.
      position: int32 [B], of row 0; row j decides the token at `position + j + 1`.
      candidates, logits, rows: as in `accept_greedy`.
    """
    batch, width, vocab = logits.shape
    target = _probabilities(logits, request)
    offsets = jnp.arange(width, dtype=jnp.int32)[None]
    keys = _place_keys(request.key, position[:, None] + offsets + 1)  # [B, K + 1]

    drafted = candidates[..., None]
    p = jnp.take_along_axis(target[:, :-1], drafted, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft_probabilities, drafted, axis=-1)[..., 0]
    coin = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, _COIN))))
    accepted = _prefix_length(coin(keys[:, :-1]) * q < p, rows)

    # The draft's distribution at the row that decides the last token; none after the last.
    padded = jnp.concatenate(
        [draft_probabilities, jnp.zeros((batch, 1, vocab), jnp.float32)], axis=1
    )
    at = accepted[:, None, None]
    p_last = jnp.take_along_axis(target, at, axis=1)[:, 0]
    q_last = jnp.take_along_axis(padded, at, axis=1)[:, 0]
    q_last = jnp.where((accepted < rows - 1)[:, None], q_last, 0.0)
    residual = jnp.maximum(p_last - q_last, 0.0)
    # Rounding can leave nothing where p and q are equal; then either is the right one.
    residual = jnp.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p_last)

    def draw(key, weights):
        return jax.random.categorical(jax.random.fold_in(key, _RESIDUAL), jnp.log(weights))

    last_key = jnp.take_along_axis(keys, accepted[:, None], axis=1)[:, 0]
    last = jax.vmap(draw)(last_key, residual).astype(jnp.int32)
    padded_candidates = jnp.concatenate([candidates, candidates[:, :1]], axis=1)
    return accepted, jnp.where(offsets == accepted[:, None], last[:, None], padded_candidates)


def draft_tokens(
    logits: jax.Array, request: RequestParams, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a candidate for each request, int32 [B], and what it was drawn from.

    Args:
      logits: float32 `[B, vocab]` of the draft.
      place: int32 [B], of the candidate in the text.
    """
    probabilities = _probabilities(logits[:, None], request)[:, 0]
    keys = _place_keys(request.key, place[:, None])[:, 0]

    def draw(key, weights):
        return jax.random.categorical(jax.random.fold_in(key, _DRAFT), jnp.log(weights))

    return jax.vmap(draw)(keys, probabilities).astype(jnp.int32), probabilities


def _prefix_length(agrees: jax.Array, rows: jax.Array) -> jax.Array:
    """Candidates before the first that does not agree, of the `rows - 1` offered."""
    offered = jnp.arange(agrees.shape[1], dtype=jnp.int32)[None] < rows[:, None] - 1
    return jnp.cumprod(agrees & offered, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def _probabilities(logits: jax.Array, request: RequestParams) -> jax.Array:
    """Sampling distributions `[B, n, vocab]` of logits `[B, n, vocab]`."""

    def one(logits, temperature, top_k, top_p):
        return jax.nn.softmax(filtered_logits(logits, temperature, top_k, top_p))

    rows = jax.vmap(one, in_axes=(0, None, None, None))
    return jax.vmap(rows)(logits, request.temperature, request.top_k, request.top_p)


def _place_keys(keys: jax.Array, places: jax.Array) -> jax.Array:
    """One key for each place `[B, n]` of each request."""
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys, places)
