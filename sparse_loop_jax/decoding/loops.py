"""Rows of hidden states through a range of loops, over the paged cache.

The one place where the model meets the cache: prefill, plain decoding, drafting and
verification differ only in their rows and in the range of depths.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.cache import PagedKVCache
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.exits import ExitReadout
from sparse_loop_jax.decoding.references import SparseRows
from sparse_loop_jax.kernels import paged_attention, write_kv
from sparse_loop_jax.models.layers import decoder_layer, rms_norm, rope_angles
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.config import DENSE


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """What one loop hands to the next."""

    hidden: jax.Array  # [B, n, hidden]
    cache: PagedKVCache
    sparse: SparseRows | None
    readout: ExitReadout | None


def run_loops(
    params: OuroParams,
    spec: DecodeSpec,
    hidden: jax.Array,
    rows: Rows,
    cache: PagedKVCache,
    depths: range,
    *,
    sparse: SparseRows | None = None,
    readout: ExitReadout | None = None,
) -> _Carry:
    """Runs `hidden [B, n, hidden]` through the loops of `depths`.

    Each loop writes the rows' K/V into its own plane before it attends. Attention is dense
    unless `sparse` is given and the depth captures or consumes.

    Returns:
      The state after the last of the loops (final norm applied), the cache, the sparse rows
      with what these loops captured and counted, and the exit readout with them counted.
    """
    angles = rope_angles(rows.positions, spec.config, hidden.dtype)

    def one_loop(depth, carry: _Carry, mode: str) -> _Carry:
        hidden, sparse = carry.hidden, carry.sparse
        table = jax.lax.dynamic_index_in_dim(
            carry.cache.page_table, depth, axis=1, keepdims=False
        )
        keys, values = list(carry.cache.keys), list(carry.cache.values)
        if sparse is not None:
            sparse = sparse.count_keys(mode, rows.lengths)
        for layer, p in enumerate(params.layers):

            def attend(q, k, v, layer=layer):
                nonlocal sparse
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
                paged = (keys[layer], values[layer], table)
                if mode == DENSE or sparse is None:
                    return paged_attention(
                        q, *paged, rows.lengths, implementation=spec.implementation
                    )
                out, sparse = sparse.attend(spec, mode, layer, q, paged, rows.lengths)
                return out

            hidden = decoder_layer(p, spec.config, hidden, *angles, attend)
        hidden = rms_norm(hidden, params.norm, spec.config.rms_norm_eps)
        readout = carry.readout
        if readout is not None:
            readout = readout.after_loop(params, depth, hidden)
        cache = dataclasses.replace(carry.cache, keys=tuple(keys), values=tuple(values))
        return _Carry(hidden, cache, sparse, readout)

    carry = _Carry(hidden, cache, sparse, readout)
    # A loop over depths of one kind, not a copy of the layers for each: a fraction of the
    # program to compile, and the page table makes the depths differ by an index only.
    for mode, run in _runs(spec, depths, sparse is not None):
        if len(run) == 1:
            carry = one_loop(jnp.int32(run.start), carry, mode)
        else:
            carry = jax.lax.fori_loop(
                run.start, run.stop, lambda depth, c, mode=mode: one_loop(depth, c, mode), carry
            )
    return carry


def _runs(spec: DecodeSpec, depths: range, sparse: bool) -> list[tuple[str, range]]:
    """Consecutive depths whose attention is of one kind."""
    modes = (DENSE,) * spec.config.total_ut_steps
    if sparse and spec.sparse is not None:
        modes = spec.sparse.modes(spec.config.total_ut_steps)
    runs: list[tuple[str, range]] = []
    for depth in depths:
        if runs and runs[-1][0] == modes[depth]:
            runs[-1] = (modes[depth], range(runs[-1][1].start, depth + 1))
        else:
            runs.append((modes[depth], range(depth, depth + 1)))
    return runs
