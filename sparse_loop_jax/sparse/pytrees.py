"""The pytrees of the reference store."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseDecodeReferenceStore:
    """Room for the references of `slots` rows over all layers, as an immutable pytree.

    Payloads are a tuple of per-layer arrays: a stacked array that a loop slices would be
    copied at every layer.
    """

    version: jax.Array  # uint32 [slots]; grows by one at every reservation
    held: jax.Array  # bool [slots]; reserved and not yet released
    count: jax.Array  # int32 [slots]; kept keys, 0 where nothing (valid) was captured
    positions: tuple[jax.Array, ...]  # uint16 or uint32 [slots, heads, capacity]: S
    mass: tuple[jax.Array, ...]  # float32 [slots, heads]: m
    base: tuple[jax.Array, ...]  # float32 [slots, heads, head_dim]: O_ref - C_ref

    @property
    def slots(self) -> int:
        return self.held.shape[0]

    @property
    def capacity(self) -> int:
        """Kept keys per head that a slot has room for."""
        return self.positions[0].shape[-1]

    @property
    def index_dtype(self):
        """uint16 or uint32."""
        return self.positions[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReferenceLease:
    """Proof of ownership of slots, one per reserved row.

    A slot belongs to the lease while it is held under the version that the lease has. Slots
    of a lease need not be neighbours.
    """

    slots: jax.Array  # int32 [B, rows]; the number of slots where there is none
    versions: jax.Array  # uint32 [B, rows]
    ok: jax.Array  # bool []; False where the reservation did not fit

    @property
    def rows(self) -> int:
        """Rows per request, at most."""
        return self.slots.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseDecodePlan:
    """For the rows of one forward pass: the slot of each, under which version."""

    slots: jax.Array  # int32 [B, n]; the number of slots where there is none
    versions: jax.Array  # uint32 [B, n]
    live: jax.Array  # bool [B, n]

    def row(self, index) -> SparseDecodePlan:
        """Row `index` (may be traced) of each request alone: `[B, 1]`."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference:
    """What the store gives to rows that consume; refused and dead rows have count 0."""

    positions: jax.Array  # uint16 or uint32 [B, n, heads, capacity]
    count: jax.Array  # int32 [B, n]
    mass: jax.Array  # float32 [B, n, heads]
    base: jax.Array  # float32 [B, n, heads, head_dim]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetainedMass:
    """Probability that kept keys had in their capture, summed so that rounds can be added."""

    total: jax.Array  # float32 [layers]; sum over rows of the mean over heads
    least: jax.Array  # float32 [layers]; smallest of any row and head, 1 without rows
    rows: jax.Array  # int32 []

    @property
    def mean(self) -> jax.Array:
        """Mean over rows and heads, float32 [layers]; 0 without rows."""
        return self.total / jnp.maximum(self.rows, 1)


class StaleLeaseError(RuntimeError):
    """Rows were used under a lease that no longer owns their slots."""
