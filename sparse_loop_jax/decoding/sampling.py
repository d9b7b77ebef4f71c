"""Choosing tokens from logits: greedy, or temperature, then top-k, then top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.state import RequestParams


def filtered_logits(logits: jax.Array, temperature, top_k, top_p) -> jax.Array:
    """Logits `[vocab]` of one request's sampling distribution; -inf where nothing is drawn.

    Divides by the temperature, keeps the `top_k` largest (ties at the threshold are kept),
    then the smallest set of the most probable tokens whose probability reaches `top_p`
    (ties at its edge are kept; at least one token is; 1 keeps all). A temperature of 0, or
    too small to be a normal float32, keeps the first argmax alone, so that greedy is the
    same draw from a one-point distribution. The largest logit comes out as 0.
    """
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits)
    greedy = jnp.where(jnp.arange(logits.shape[-1]) == jnp.argmax(logits), 0.0, -jnp.inf)
    warm = temperature >= jnp.finfo(jnp.float32).tiny
    # Less the largest before the division, which may then overflow to -inf but not to inf.
    scaled = (logits - largest) / jnp.where(warm, temperature, 1.0)
    ordered = jnp.sort(scaled, descending=True)
    kth = ordered[jnp.clip(top_k, 1, logits.shape[-1]) - 1]
    probabilities = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf))
    # A token is kept while those before it have not reached top_p; the first always is.
    # The sum of them all rounds to either side of 1, so that it decides nothing at 1.
    before = jnp.cumsum(probabilities) - probabilities
    kept = ((before < top_p) | (top_p >= 1)).at[0].set(True)
    edge = jnp.min(jnp.where(kept, ordered, jnp.inf))
    sampled = jnp.where(scaled >= jnp.maximum(edge, kth), scaled, -jnp.inf)
    return jnp.where(warm, sampled, greedy)


def seed_words(seed: int) -> tuple[int, int]:
    """The two 32-bit words of a seed below 2^63, the low one first."""
    return int(seed) & 0xFFFFFFFF, int(seed) >> 32


def request_key(words: jax.Array, occurrence: jax.Array) -> jax.Array:
    """The PRNG key of one request.

    Args:
      words: uint32 [2], `seed_words` of its seed.
      occurrence: how many equal prompts came before it; 0 for what it would draw alone.
    """
    seeded = jax.random.fold_in(jax.random.key(words[0]), words[1])
    return jax.random.fold_in(seeded, occurrence)


def choose_tokens(
    logits: jax.Array, request: RequestParams, position: jax.Array, *, sampled: bool
) -> jax.Array:
    """The next token of each request, int32 [B].

    Args:
      logits: float32 `[B, vocab]`.
      position: int32 [B]; the place of the token to be chosen. A draw's randomness is the
        request's key and this place, so it is the same whatever is in the batch.
      sampled: False compiles the argmax alone.
    """
    if not sampled:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(logits, temperature, top_k, top_p, key, position):
        filtered = filtered_logits(logits, temperature, top_k, top_p)
        return jax.random.categorical(jax.random.fold_in(key, position), filtered)

    tokens = jax.vmap(draw)(
        logits, request.temperature, request.top_k, request.top_p, request.key, position
    )
    return tokens.astype(jnp.int32)
