"""Early exit: after which loop a row leaves, what is read then, and the K/V of the rest.

The gate's rule is the published one. A threshold of 1 never leaves early, whatever rounding
does to the summed probabilities.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.cache import PagedKVCache
from sparse_loop_jax.decoding.state import RequestParams
from sparse_loop_jax.kernels.kv_write import write_kv
from sparse_loop_jax.kernels.kv_write.places import place_rows
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
    min_loops: jax.Array  # int32 [B]; the gate is not asked before so many loops
    max_loops: jax.Array  # int32 [B]; after so many loops a row leaves unasked

    def after_loop(self, params: OuroParams, depth, hidden: jax.Array) -> ExitReadout:
        """Counts one more loop: leaves at the first whose summed probability is enough.

        Loops before `min_loops` count in the sum.
        """
        hazard = jax.nn.sigmoid(exit_gate_logits(params, hidden))
        survival = self.survival * (1.0 - hazard)
        threshold = self.threshold[:, None]
        # The summed exit probability after a loop is 1 - survival.
        enough = (threshold < 1.0) & (1.0 - survival >= threshold)
        leaves = enough & (depth + 1 >= self.min_loops)[:, None]
        leaves |= (depth + 1 >= self.max_loops)[:, None]
        return dataclasses.replace(
            self,
            hidden=jnp.where(self.left[..., None], self.hidden, hidden),
            loop=jnp.where(self.left, self.loop, depth),
            survival=survival,
            left=self.left | leaves,
        )


def start_exit_readout(
    hidden: jax.Array, live: jax.Array, request: RequestParams
) -> ExitReadout:
    """No loop counted yet. `hidden [B, n, hidden]`, `live` bool `[B, n]`: dead rows are out."""
    lead = hidden.shape[:2]
    return ExitReadout(
        hidden=hidden,
        loop=jnp.zeros(lead, jnp.int32),
        survival=jnp.ones(lead, jnp.float32),
        left=~live,
        threshold=request.exit_threshold,
        min_loops=request.min_loops,
        max_loops=request.max_loops,
    )


def fill_skipped_loops(
    cache: PagedKVCache, positions: jax.Array, live: jax.Array, loop: jax.Array
) -> PagedKVCache:
    """Copies each row's K/V of the last loop that it ran to all deeper ones.

    Later tokens may go deeper: they find K/V of every earlier token there.

    Args:
      positions: int32 `[B, 1]`.
      live: bool `[B, 1]`; dead rows copy nothing.
      loop: int32 `[B, 1]`; the depth of the last loop run.
    """
    _, loops, width = cache.page_table.shape
    own = jnp.take_along_axis(cache.page_table, loop[..., None], axis=1)[:, 0]
    page, token = place_rows(cache.keys[0], own, positions, live)
    # One write for all deeper loops: to it, each is a request with a page table of its own.
    deeper = jnp.arange(1, loops, dtype=jnp.int32)[None]
    target = (
        cache.page_table[:, 1:].reshape(-1, width),
        jnp.repeat(positions, loops - 1, axis=0),
        (live & (deeper > loop)).reshape(-1, 1),
    )

    def copied(pool: jax.Array) -> jax.Array:
        rows = pool.at[page, :, token].get(mode="clip")  # [B, 1, kv_heads, head_dim]
        return jnp.repeat(rows, loops - 1, axis=0)

    filled = [
        write_kv(k_pool, v_pool, copied(k_pool), copied(v_pool), *target)
        for k_pool, v_pool in zip(cache.keys, cache.values, strict=True)
    ]
    keys, values = zip(*filled, strict=True)
    return dataclasses.replace(cache, keys=keys, values=values)
