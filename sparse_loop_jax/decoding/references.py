"""The life of a round's references: reserved, captured, consumed, accepted, handed out.

Every state has a lease to retire, so that dense and sparse steps have one signature; a
dense state's lease is of no slots.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.state import (
    DecodeState,
    RoundCounters,
    RoundOutput,
    SparseCounters,
    emit,
)
from sparse_loop_jax.sparse import store as reference_store
from sparse_loop_jax.sparse.attention import attend_rows
from sparse_loop_jax.sparse.config import CONSUME
from sparse_loop_jax.sparse.store import (
    ReferenceLease,
    SparseDecodePlan,
    SparseDecodeReferenceStore,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseRows:
    """The references of the rows at hand, threaded through the layers."""

    store: SparseDecodeReferenceStore
    plan: SparseDecodePlan  # of [B, n] rows
    key_counts: jax.Array  # int32 [context + 1]; k by N
    refused: jax.Array  # bool [B]; a row of the request was refused
    captured: jax.Array  # int32 []
    consumed: jax.Array  # int32 []
    keys_read: jax.Array  # float32 []
    keys_dense: jax.Array  # float32 []

    def attend(
        self,
        spec: DecodeSpec,
        mode: str,
        layer: int,
        q: jax.Array,
        paged: tuple[jax.Array, jax.Array, jax.Array],
        lengths: jax.Array,
    ) -> tuple[jax.Array, SparseRows]:
        """Captures, consumes or both in one layer; see `sparse.attention`.

        Args:
          mode: of `SparseDecodeConfig.modes`, not "dense".
          paged: the layer's two pools and the loop's page table.
          lengths: int32 `[B, n]`.
        """
        assert spec.sparse is not None
        out, store, refused = attend_rows(
            mode,
            self.store,
            self.plan,
            layer,
            q,
            *paged,
            lengths,
            self.key_counts,
            config=spec.sparse,
            implementation=spec.sparse.implementation or spec.implementation,
            dense_implementation=spec.implementation,
        )
        served = (self.plan.live & ~refused).sum(dtype=jnp.int32)
        return out, dataclasses.replace(
            self,
            store=store,
            refused=self.refused | refused.any(axis=1),
            captured=self.captured + (served if "capture" in mode else 0),
            consumed=self.consumed + (served if "consume" in mode else 0),
        )

    def count_keys(self, spec: DecodeSpec, mode: str, lengths: jax.Array) -> SparseRows:
        """Counts the keys that one loop's rows read, and what dense attention would."""
        dense = lengths.sum().astype(jnp.float32)
        read = dense
        # The true mass of the kept keys takes the scores of them all.
        oracle = spec.sparse is not None and spec.sparse.mass_scaling == "oracle"
        if mode == CONSUME and not oracle:
            read = jnp.where(lengths > 0, self.key_counts[lengths], 0).sum().astype(jnp.float32)
        return dataclasses.replace(
            self, keys_read=self.keys_read + read, keys_dense=self.keys_dense + dense
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenRound:
    """A round between `open_round` and `close_round`."""

    wanted: jax.Array  # int32 [B]; rows asked for
    rows: jax.Array  # int32 [B]; rows to run, 0 where no slots could be had
    lease: ReferenceLease
    sparse: SparseRows | None


def no_lease(state: DecodeState) -> ReferenceLease:
    """A lease of nothing, in the shape of the state's rounds: what the first one retires."""
    slots = 0 if state.store is None else state.store.slots
    return reference_store.empty_lease(slots, state.token.shape[0], state.spec.rows)


def open_round(state: DecodeState, retire: ReferenceLease, wanted: jax.Array) -> OpenRound:
    """Frees the retired slots and reserves a slot for each wanted row, int32 [B].

    All or nothing: without enough slots no row is run and nothing is emitted.
    """
    if state.store is None or state.key_counts is None:
        return OpenRound(wanted, wanted, no_lease(state), None)
    store, _ = reference_store.release(state.store, retire)
    store, lease = reference_store.reserve(store, wanted, state.spec.rows)
    rows = jnp.where(lease.ok, wanted, 0)
    offsets = jnp.arange(state.spec.rows, dtype=jnp.int32)[None]
    live = offsets < rows[:, None]
    plan, refused = reference_store.plan(store, lease, live)
    sparse = SparseRows(
        store=store,
        plan=plan,
        key_counts=state.key_counts,
        refused=refused.any(axis=1),
        captured=jnp.int32(0),
        consumed=jnp.int32(0),
        keys_read=jnp.float32(0),
        keys_dense=jnp.float32(0),
    )
    return OpenRound(wanted, rows, lease, sparse)


def column(sparse: SparseRows | None, i) -> SparseRows | None:
    """The same references with row i of each request alone in the plan."""
    if sparse is None:
        return None
    return dataclasses.replace(sparse, plan=sparse.plan.row(i))


def with_plan(sparse: SparseRows | None, like: SparseRows | None) -> SparseRows | None:
    """`sparse` with the plan of `like`: the way back from `column`."""
    if sparse is None or like is None:
        return None
    return dataclasses.replace(sparse, plan=like.plan)


def close_round(
    state: DecodeState,
    round_: OpenRound,
    sparse: SparseRows | None,
    tokens: jax.Array,
    accepted: jax.Array,
    logits: jax.Array,
) -> tuple[DecodeState, RoundOutput]:
    """Emits the accepted tokens and one more, and invalidates the rest's references.

    Args:
      sparse: as the last of the round's loops left it.
      tokens: int32 `[B, n]`, of which each request emits the first `accepted + 1`, unless
        one of its rows was refused a reference: then it emits nothing and stays in place.
    """
    refused = (round_.wanted > 0) & (round_.rows == 0)
    if sparse is not None:
        refused |= sparse.refused & (round_.rows > 0)
    wanted = jnp.where((round_.rows > 0) & ~refused, accepted + 1, 0)
    state, count = emit(state, tokens, wanted)
    drafted = jnp.where(wanted > 0, round_.rows - 1, 0)
    history = state.history
    if history is not None:
        history = history.after_round(drafted, jnp.where(wanted > 0, accepted, 0))
    store = state.store
    if sparse is not None:
        store = reference_store.accept(sparse.store, round_.lease, jnp.maximum(count - 1, 0))
    state = dataclasses.replace(
        state, position=state.position + count, history=history, store=store
    )
    output = RoundOutput(
        tokens=tokens,
        count=count,
        logits=logits,
        lease=round_.lease,
        counters=_counters(state, round_, sparse, count, drafted, refused),
    )
    return state, output


@functools.partial(jax.jit, donate_argnames=("store",))
def _retire(store: SparseDecodeReferenceStore, lease: ReferenceLease):
    return reference_store.release(store, lease)[0]


def retire(state: DecodeState, lease: ReferenceLease) -> DecodeState:
    """The state with the lease's slots free, outside of a round. Its store is donated."""
    if state.store is None:
        return state
    return dataclasses.replace(state, store=_retire(state.store, lease))


def no_counters(state: DecodeState) -> RoundCounters:
    """Counters of no round, in the shape of the state's."""
    zero = jnp.int32(0)
    drafted = jnp.zeros((state.spec.rows - 1,), jnp.int32)
    sparse = None
    if state.store is not None:
        layers = state.spec.config.num_hidden_layers
        sparse = SparseCounters(
            captured=zero,
            consumed=zero,
            keys_read=jnp.float32(0),
            keys_dense=jnp.float32(0),
            mass_sum=jnp.zeros((layers,), jnp.float32),
            mass_min=jnp.ones((layers,), jnp.float32),
            mass_rows=zero,
        )
    skipped = zero if state.spec.early_exit else None
    return RoundCounters(zero, drafted, drafted, zero, zero, sparse, skipped)


def add_counters(a: RoundCounters, b: RoundCounters) -> RoundCounters:
    """Two spans of rounds counted as one."""
    total = jax.tree.map(jnp.add, a, b)
    if total.sparse is None:
        return total
    assert a.sparse is not None
    assert b.sparse is not None
    least = jnp.minimum(a.sparse.mass_min, b.sparse.mass_min)
    return dataclasses.replace(total, sparse=dataclasses.replace(total.sparse, mass_min=least))


def _counters(state, round_: OpenRound, sparse: SparseRows | None, count, drafted, refused):
    places = jnp.arange(state.spec.rows - 1, dtype=jnp.int32)[None]
    return RoundCounters(
        rounds=(round_.wanted > 0).any().astype(jnp.int32),
        drafted=_sum(places < drafted[:, None]),
        accepted=_sum(places < count[:, None] - 1),
        emitted=count.sum(dtype=jnp.int32),
        refused=refused.sum(dtype=jnp.int32),
        sparse=None if sparse is None else _sparse_counters(round_.lease, state, sparse, count),
    )


def _sparse_counters(lease: ReferenceLease, state, sparse: SparseRows, count) -> SparseCounters:
    mass = reference_store.retained_mass(state.store, lease)
    return SparseCounters(
        captured=sparse.captured,
        consumed=sparse.consumed,
        keys_read=sparse.keys_read,
        keys_dense=sparse.keys_dense,
        mass_sum=mass.total,
        mass_min=mass.least,
        mass_rows=mass.rows,
    )


def _sum(flags: jax.Array) -> jax.Array:
    return flags.sum(axis=0, dtype=jnp.int32)
