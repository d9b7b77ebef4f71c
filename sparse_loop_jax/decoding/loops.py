"""Rows of hidden states through a range of loops, over the paged cache.

The one place where the model meets the cache: prefill, plain decoding, drafting and
verification differ only in their rows and in the range of depths.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.cache import PagedKVCache
from sparse_loop_jax.decoding.exits import ExitReadout
from sparse_loop_jax.decoding.state import DecodeSpec
from sparse_loop_jax.kernels import paged_attention, write_kv
from sparse_loop_jax.models.layers import decoder_layer, rms_norm, rope_angles
from sparse_loop_jax.models.params import OuroParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """n rows for each of B requests. A row sees its request's tokens up to its own."""

    positions: jax.Array  # int32 [B, n]
    live: jax.Array  # bool [B, n]; dead rows write nothing and see nothing

    @property
    def lengths(self) -> jax.Array:
        """Keys that each row sees, its own among them: int32 [B, n]."""
        return jnp.where(self.live, self.positions + 1, 0)


def run_loops(
    params: OuroParams,
    spec: DecodeSpec,
    hidden: jax.Array,
    rows: Rows,
    cache: PagedKVCache,
    depths: range,
    exit_readout: ExitReadout | None = None,
) -> tuple[jax.Array, PagedKVCache, ExitReadout | None]:
    """Runs `hidden [B, n, hidden]` through the loops of `depths`, dense attention.

    Each loop writes the rows' K/V into its own plane before it attends.

    Returns:
      The state after the last of the loops (final norm applied), the cache, and the exit
      readout with these loops counted, if one was given.
    """
    angles = rope_angles(rows.positions, spec.config, hidden.dtype)

    def one_loop(depth, carry):
        hidden, cache, readout = carry
        table = jax.lax.dynamic_index_in_dim(cache.page_table, depth, axis=1, keepdims=False)
        keys, values = list(cache.keys), list(cache.values)
        for layer, p in enumerate(params.layers):

            def attend(q, k, v, layer=layer):
                keys[layer], values[layer] = write_kv(
                    keys[layer],
                    values[layer],
                    k,
                    v,
                    table,
                    rows.positions,
                    rows.live,
                    implementation=spec.implementation,
                )
                return paged_attention(
                    q,
                    keys[layer],
                    values[layer],
                    table,
                    rows.lengths,
                    implementation=spec.implementation,
                )

            hidden = decoder_layer(p, spec.config, hidden, *angles, attend)
        hidden = rms_norm(hidden, params.norm, spec.config.rms_norm_eps)
        if readout is not None:
            readout = readout.after_loop(params, depth, hidden)
        cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        return hidden, cache, readout

    # A loop over the depths, not a copy of the layers for each: a quarter of the program
    # to compile, and the page table makes the loops differ by an index only.
    carry = (hidden, cache, exit_readout)
    return jax.lax.fori_loop(depths.start, depths.stop, one_loop, carry)
