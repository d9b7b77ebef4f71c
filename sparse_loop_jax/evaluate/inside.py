"""A decoded row seen from inside: what its kept keys are worth in every loop.

A research path beside `decode_step`, made of the same pieces: the loops are run one by one
and each layer's attention is compared with the dense attention of the same input. It costs
a second dense attention a layer, so that nothing fast uses it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.loops import Rows, run_loops
from sparse_loop_jax.decoding.references import SparseRows
from sparse_loop_jax.decoding.state import DecodeState, RoundOutput
from sparse_loop_jax.kernels import paged_attention
from sparse_loop_jax.models.layers import lm_logits
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.config import CAPTURE, DENSE
from sparse_loop_jax.sparse.oracle import selection_mass
from sparse_loop_jax.sparse.store import ReferenceLease


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerView:
    """Attention of one layer in one loop that captures or consumes, for rows `[B, n]`."""

    q: jax.Array  # [B, n, heads, head_dim], rotated
    out: jax.Array  # as q; what went on
    dense: jax.Array  # as q; dense attention of the same queries, keys and values
    positions: jax.Array  # [B, n, heads, capacity]; the kept keys, ascending
    count: jax.Array  # int32 [B, n]; how many of them there are
    mass: jax.Array  # float32 [B, n, heads]; of the kept keys in this loop's own softmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedRows(SparseRows):
    """`SparseRows` that remember each layer's attention of the loop at hand."""

    views: tuple[LayerView, ...] = ()

    def attend(self, spec: DecodeSpec, mode: str, layer: int, q: jax.Array, paged, lengths):
        out, rows = super().attend(spec, mode, layer, q, paged, lengths)
        assert isinstance(rows, WatchedRows)
        # A loop that recaptures consumed what was there before.
        store = rows.store if mode == CAPTURE else self.store
        slots = jnp.where(self.plan.live, self.plan.slots, 0)
        positions = store.positions[layer][slots]
        count = jnp.where(self.plan.live, self.key_counts[lengths], 0)
        view = LayerView(
            q=q,
            out=out,
            dense=paged_attention(q, *paged, lengths, implementation=spec.implementation),
            positions=positions,
            count=count,
            mass=selection_mass(q, paged[0], paged[2], lengths, positions, count),
        )
        return out, dataclasses.replace(rows, views=(*rows.views, view))


def watched_step(
    params: OuroParams, state: DecodeState, retire: ReferenceLease
) -> tuple[DecodeState, RoundOutput, dict[int, tuple[LayerView, ...]]]:
    """`decode_step` of a sparse greedy state, and the views of its layers by loop.

    Pure and not jitted. Loops that attend densely and capture nothing have no views.

    Raises:
      ValueError: the state is dense, or decodes otherwise than greedily and to full depth.
    """
    spec = state.spec
    if spec.sparse is None or spec.sampled or spec.speculative is not None:
        raise ValueError("only plain greedy sparse decoding can be watched")
    round_ = references.open_round(state, retire, state.live.astype(jnp.int32))
    fields = {f.name: getattr(round_.sparse, f.name) for f in dataclasses.fields(SparseRows)}
    sparse, cache = WatchedRows(**fields), state.cache
    hidden = params.embed[state.token][:, None]
    rows = Rows(state.position[:, None], (round_.rows > 0)[:, None])
    views = {}
    for depth, mode in enumerate(spec.sparse.modes(spec.config.total_ut_steps)):
        done = run_loops(
            params, spec, hidden, rows, cache, range(depth, depth + 1), sparse=sparse
        )
        hidden, cache = done.hidden, done.cache
        assert isinstance(done.sparse, WatchedRows)
        if mode != DENSE:
            views[depth] = done.sparse.views
        sparse = dataclasses.replace(done.sparse, views=())
    logits = lm_logits(params, hidden)
    token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)[:, None]
    state = dataclasses.replace(state, cache=cache)
    accepted = jnp.zeros_like(round_.rows)
    state, output = references.close_round(state, round_, sparse, token, accepted, logits)
    return state, output, views


look_inside = jax.jit(watched_step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopSummary:
    """A loop's views of one row per request, in three numbers a head: `[layers, B, heads]`."""

    mass: jax.Array  # float32; kept keys' mass in the loop's own softmax
    error: jax.Array  # float32; squared norm of `out - dense`
    size: jax.Array  # float32; squared norm of `dense`


def summary_step(params: OuroParams, state: DecodeState, retire: ReferenceLease):
    """`watched_step` with the views reduced, for a scan over many rows."""
    state, output, views = watched_step(params, state, retire)
    return state, output, {depth: _summary(layers) for depth, layers in views.items()}


def _summary(layers: tuple[LayerView, ...]) -> LoopSummary:
    def squares(x):
        return jnp.square(x.astype(jnp.float32)).sum(axis=-1)[:, 0]

    return LoopSummary(
        mass=jnp.stack([v.mass[:, 0] for v in layers]),
        error=jnp.stack(
            [squares(v.out.astype(jnp.float32) - v.dense.astype(jnp.float32)) for v in layers]
        ),
        size=jnp.stack([squares(v.dense) for v in layers]),
    )
