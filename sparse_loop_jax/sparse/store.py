"""The life of references: reserve, plan, capture, consume, accept, release.

Every function is pure and works under `jit`, `scan`, `while_loop` and donation: the store
goes in and a new one comes out, updated in place where it was donated. Nothing raises and
nothing reads the host; what was refused comes out as arrays, and `check` raises on the host.

A slot belongs to whoever reserved it last, until it is released. Its version grows at every
reservation and is compared for equality only, so that a lease or a plan made by an earlier
owner can neither read nor write the slot once it was handed out again.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.kernels.capture_attention.xla import write_rows
from sparse_loop_jax.sparse.pytrees import (
    Reference as Reference,
    ReferenceLease as ReferenceLease,
    RetainedMass as RetainedMass,
    SparseDecodePlan as SparseDecodePlan,
    SparseDecodeReferenceStore as SparseDecodeReferenceStore,
    StaleLeaseError as StaleLeaseError,
)
from sparse_loop_jax.sparse.sizing import create as create, nbytes_for as nbytes_for

Store = SparseDecodeReferenceStore


def empty_lease(slots: int, batch: int, rows: int) -> ReferenceLease:
    """A lease of nothing, in the shape of real ones: releasing it frees and refuses nothing.

    Args:
      slots: of the store; ids of this value are past its end.
    """
    return ReferenceLease(
        slots=jnp.full((batch, rows), slots, jnp.int32),
        versions=jnp.zeros((batch, rows), jnp.uint32),
        ok=jnp.ones((), bool),
    )


def reserve(store: Store, wanted: jax.Array, max_rows: int) -> tuple[Store, ReferenceLease]:
    """Slots for the first `wanted` of `max_rows` rows of each request, for all or for none.

    Args:
      wanted: int32 `[B]`, each between 0 and `max_rows`.
      max_rows: rows of the lease.

    Returns:
      The store with the slots held under new versions and their counts cleared, and the
      lease. Without enough free slots, or with a `wanted` out of range: the store as it was,
      and a lease of nothing whose `ok` is False.
    """
    slots = store.slots
    free = ~store.held
    fits = ((wanted >= 0) & (wanted <= max_rows)).all()
    ok = fits & (wanted.sum() <= free.sum())
    wanted = jnp.where(ok, wanted, 0)

    # Free slots and wanted rows are numbered alike; equal numbers meet.
    free_rank = jnp.cumsum(free, dtype=jnp.int32) - 1
    taken = free & (free_rank < wanted.sum())
    row_rank = (jnp.cumsum(wanted) - wanted)[:, None] + jnp.arange(max_rows)[None]
    inside = jnp.arange(max_rows)[None] < wanted[:, None]
    total = wanted.shape[0] * max_rows
    by_rank = jnp.full((total,), slots, jnp.int32)
    by_rank = by_rank.at[jnp.where(taken, free_rank, total)].set(
        jnp.arange(slots, dtype=jnp.int32), mode="drop"
    )
    lease_slots = by_rank.at[jnp.where(inside, row_rank, total)].get(
        mode="fill", fill_value=slots
    )

    version = store.version + taken.astype(jnp.uint32)
    store = dataclasses.replace(
        store,
        version=version,
        held=store.held | taken,
        count=jnp.where(taken, 0, store.count),  # a stale payload must not be seen
    )
    versions = version.at[lease_slots].get(mode="fill", fill_value=0)
    return store, ReferenceLease(lease_slots, versions, ok)


def plan(
    store: Store, lease: ReferenceLease, live: jax.Array
) -> tuple[SparseDecodePlan, jax.Array]:
    """The plan of rows that are live and owned, and what was refused.

    Args:
      live: bool `[B, rows]`.

    Returns:
      The plan, and bool `[B, rows]`: rows that are live and that the lease does not own.
    """
    _require_shape("live", live, lease.slots.shape)
    owned = _owned(store, lease.slots, lease.versions)
    return SparseDecodePlan(lease.slots, lease.versions, live & owned), live & ~owned


def capture(
    store: Store,
    plan: SparseDecodePlan,
    layer: int,
    counts: jax.Array,
    positions: jax.Array,
    mass: jax.Array,
    base: jax.Array,
) -> tuple[Store, jax.Array]:
    """Writes the references of one layer into the slots of the rows.

    Args:
      plan: of `[B, n]` rows.
      layer: static. The last layer's capture makes the row's reference readable, so that
        all layers of a forward pass are to be captured before one is consumed.
      counts: int32 `[B, n]`, kept keys.
      positions: `[B, n, heads, capacity]` in the store's index dtype.
      mass: float32 `[B, n, heads]`.
      base: float32 `[B, n, heads, head_dim]`, `O_ref - C_ref`.

    Returns:
      The store, every slot of no live row as it was bit for bit, and bool `[B, n]`: live
      rows that no longer own their slot.

    Raises:
      ValueError: a shape or dtype does not fit the store.
    """
    _require_layer(store, layer)
    lead = plan.slots.shape
    _require_shape("counts", counts, lead)
    for name, value, stored in (
        ("positions", positions, store.positions[layer]),
        ("mass", mass, store.mass[layer]),
        ("base", base, store.base[layer]),
    ):
        _require_shape(name, value, (*lead, *stored.shape[1:]), stored.dtype)
    rows, refused = targets(store, plan)
    written = (
        write_rows(store.positions[layer], rows, positions),
        write_rows(store.mass[layer], rows, mass),
        write_rows(store.base[layer], rows, base),
    )
    return with_layer(store, layer, rows, counts, *written), refused


def targets(store: Store, plan: SparseDecodePlan) -> tuple[jax.Array, jax.Array]:
    """Where the rows of a capture go, for who writes a layer's arrays himself.

    Returns:
      int32 `[B, n]`, the slot of each live row that owns it and the number of slots for the
      others; and bool `[B, n]`: live rows that no longer own their slot.
    """
    owned = plan.live & _owned(store, plan.slots, plan.versions)
    return jnp.where(owned, plan.slots, store.slots), plan.live & ~owned


def with_layer(
    store: Store,
    layer: int,
    rows: jax.Array,
    counts: jax.Array,
    positions: jax.Array,
    mass: jax.Array,
    base: jax.Array,
) -> Store:
    """The store with a layer's arrays after a capture of `counts` keys into `rows`.

    Args:
      rows, counts: int32 `[B, n]`; rows of `targets`.
      positions, mass, base: of all slots, as the store has them.
    """

    def put(arrays, array):
        return (*arrays[:layer], array, *arrays[layer + 1 :])

    last = layer == len(store.positions) - 1
    return dataclasses.replace(
        store,
        count=write_rows(store.count, rows, counts) if last else store.count,
        positions=put(store.positions, positions),
        mass=put(store.mass, mass),
        base=put(store.base, base),
    )


def consume(store: Store, plan: SparseDecodePlan, layer: int) -> tuple[Reference, jax.Array]:
    """Reads the references of one layer for the rows.

    Returns:
      The references, with count 0 for dead and refused rows, and bool `[B, n]`: live rows
      that no longer own their slot, or for which nothing valid was captured.

    Raises:
      ValueError: the store has no such layer.
    """
    _require_layer(store, layer)
    rows, count, refused = find(store, plan)
    reference = Reference(
        positions=store.positions[layer][rows],
        count=count,
        mass=store.mass[layer][rows],
        base=store.base[layer][rows],
    )
    return reference, refused


def find(store: Store, plan: SparseDecodePlan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the references of the rows are, for who reads a layer's arrays himself.

    Returns:
      int32 `[B, n]` slots, any one for rows without a reference; int32 `[B, n]` kept keys, 0
      for dead and refused rows; and what `consume` refuses.
    """
    owned = plan.live & _owned(store, plan.slots, plan.versions)
    rows = jnp.where(owned, plan.slots, 0)
    count = jnp.where(owned, store.count[rows], 0)
    return rows, count, plan.live & (count == 0)


def accept(store: Store, lease: ReferenceLease, accepted: jax.Array) -> Store:
    """Keeps the references of rows 0..accepted of each request and clears the others.

    Args:
      accepted: int32 `[B]`; row 0, the root, survives whatever it says.
    """
    _require_shape("accepted", accepted, lease.slots.shape[:1])
    if lease.rows == 1:
        return store  # roots alone
    row = jnp.arange(lease.rows, dtype=jnp.int32)[None]
    rejected = row > jnp.maximum(accepted, 0)[:, None]
    rejected &= _owned(store, lease.slots, lease.versions)
    target = jnp.where(rejected, lease.slots, store.slots)
    return dataclasses.replace(store, count=store.count.at[target].set(0, mode="drop"))


def release(store: Store, lease: ReferenceLease) -> tuple[Store, jax.Array]:
    """Frees the slots that the lease still owns.

    Returns:
      The store, and bool `[B, rows]`: rows whose slot the lease does not own (any more).
    """
    owned = _owned(store, lease.slots, lease.versions)
    target = jnp.where(owned, lease.slots, store.slots)
    held = store.held.at[target].set(False, mode="drop")
    return dataclasses.replace(store, held=held), _in_range(store, lease.slots) & ~owned


def retained_mass(store: Store, lease: ReferenceLease) -> RetainedMass:
    """Mass of the rows of a lease that have a reference: after `accept`, the emitted ones."""
    owned = _owned(store, lease.slots, lease.versions)
    slots = jnp.where(owned, lease.slots, 0)
    valid = owned & (store.count[slots] > 0)
    mass = jnp.stack([layer[slots] for layer in store.mass])  # [layers, B, rows, heads]
    total = jnp.where(valid[None], mass.mean(axis=-1), 0).sum(axis=(1, 2))
    least = jnp.where(valid[None, ..., None], mass, 1).min(axis=(1, 2, 3))
    return RetainedMass(total, least, valid.sum(dtype=jnp.int32))


def check(**refused) -> None:
    """Raises on the host if anything was refused; reads the device.

    Args:
      refused: by what was done ("capture", "release", ...), bool arrays or counts.

    Raises:
      StaleLeaseError: at least one row was refused; the message counts them by name.
    """
    counts = {name: int(np.sum(np.asarray(rows))) for name, rows in refused.items()}
    if any(counts.values()):
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
        raise StaleLeaseError(
            f"rows refused ({listed}): their lease no longer owns the slots, or nothing valid "
            "was captured for them"
        )


def _in_range(store: Store, slots: jax.Array) -> jax.Array:
    return (slots >= 0) & (slots < store.slots)


def _owned(store: Store, slots: jax.Array, versions: jax.Array) -> jax.Array:
    """Whether each slot is held under the version."""
    inside = _in_range(store, slots)
    slots = jnp.where(inside, slots, 0)
    return inside & store.held[slots] & (store.version[slots] == versions)


def _require_layer(store: Store, layer: int) -> None:
    if not 0 <= layer < len(store.positions):
        raise ValueError(f"the store has {len(store.positions)} layers, got layer {layer}")


def _require_shape(name: str, value: jax.Array, shape: tuple[int, ...], dtype=None) -> None:
    if value.shape != shape or dtype not in (None, value.dtype):
        raise ValueError(
            f"{name} must be {dtype or 'of shape'} {shape}, got {value.dtype} {value.shape}"
        )
