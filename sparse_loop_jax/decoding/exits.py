"""The early-exit readout of decoding: which loop's state the LM head reads.

All loops are run; only the choice of the state follows the gate, as published. A threshold
of 1 never leaves early, whatever rounding does to the summed probabilities.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.models.layers import exit_gate_logits
from sparse_loop_jax.models.params import OuroParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExitReadout:
    """The choice so far, for n rows of each of B requests."""

    hidden: jax.Array  # [B, n, hidden]; the chosen state, or the latest one
    loop: jax.Array  # int32 [B, n]; its depth
    survival: jax.Array  # float32 [B, n]; prod (1 - sigmoid(gate)) over the loops so far
    left: jax.Array  # bool [B, n]
    threshold: jax.Array  # float32 [B]

    def after_loop(self, params: OuroParams, depth, hidden: jax.Array) -> ExitReadout:
        """Counts one more loop: leaves at the first whose summed probability is enough."""
        hazard = jax.nn.sigmoid(exit_gate_logits(params, hidden))
        survival = self.survival * (1.0 - hazard)
        threshold = self.threshold[:, None]
        # The summed exit probability after a loop is 1 - survival.
        leaves = (threshold < 1.0) & (1.0 - survival >= threshold)
        return ExitReadout(
            hidden=jnp.where(self.left[..., None], self.hidden, hidden),
            loop=jnp.where(self.left, self.loop, depth),
            survival=survival,
            left=self.left | leaves,
            threshold=self.threshold,
        )


def start_exit_readout(hidden: jax.Array, threshold: jax.Array) -> ExitReadout:
    """No loop counted yet. `hidden [B, n, hidden]`, `threshold` float32 [B]."""
    lead = hidden.shape[:2]
    return ExitReadout(
        hidden=hidden,
        loop=jnp.zeros(lead, jnp.int32),
        survival=jnp.ones(lead, jnp.float32),
        left=jnp.zeros(lead, bool),
        threshold=threshold,
    )
