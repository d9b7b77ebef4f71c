"""How many tokens to draft, from a request's own history, on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# A round's evidence halves in weight after about seven rounds.
_DECAY = 0.9
# Before there is evidence: as if eight of ten tokens had stood, with a weight of four.
_PRIOR = (3.2, 4.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftHistory:
    """Discounted counts of each request's drafted tokens."""

    accepted: jax.Array  # float32 [B]
    judged: jax.Array  # float32 [B], accepted ones and the first refused

    def after_round(self, drafted: jax.Array, accepted: jax.Array) -> DraftHistory:
        """Counts a round of `drafted` int32 [B] tokens. Rounds without any change nothing."""
        judged = jnp.minimum(accepted + 1, drafted)
        happened = drafted > 0
        return DraftHistory(
            jnp.where(happened, _DECAY * self.accepted + accepted, self.accepted),
            jnp.where(happened, _DECAY * self.judged + judged, self.judged),
        )

    def best_length(self, most: int, draft_share: float) -> jax.Array:
        """The number of drafted tokens, 1 to `most`, that promises the most per cost.

        With each token standing with probability a, K drafted ones yield
        (1 - a^(K+1)) / (1 - a) tokens for the bytes of 1 + K * draft_share whole passes
        (design: each row runs each loop once, and the deeper loops of all rows at once).

        Args:
          draft_share: draft loops / all loops.
        """
        rate = jnp.clip(self.accepted / self.judged, 0.0, 0.999)[:, None]
        lengths = jnp.arange(1, most + 1, dtype=jnp.float32)[None]
        gain = (1.0 - rate ** (lengths + 1.0)) / (1.0 - rate)
        return 1 + jnp.argmax(gain / (1.0 + lengths * draft_share), axis=1).astype(jnp.int32)


def new_history(batch: int) -> DraftHistory:
    """The history of `batch` requests that have drafted nothing."""
    accepted, judged = _PRIOR
    return DraftHistory(
        accepted=jnp.full((batch,), accepted, jnp.float32),
        judged=jnp.full((batch,), judged, jnp.float32),
    )
