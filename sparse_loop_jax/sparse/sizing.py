"""Bytes of a reference store, before and at its allocation."""

from __future__ import annotations

import jax.numpy as jnp

from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse.config import SparseDecodeConfig
from sparse_loop_jax.sparse.pytrees import SparseDecodeReferenceStore


def index_dtype_for(max_tokens: int):
    """The dtype of positions below `max_tokens`: uint16 as long as they fit."""
    return jnp.uint16 if max_tokens <= 1 << 16 else jnp.uint32


def nbytes_for(
    config: SparseDecodeConfig,
    model: OuroConfig,
    slots: int,
    capacity: int,
    max_tokens: int | None = None,
) -> int:
    """Bytes that `create` with the same sizes allocates; 0 where every key is kept."""
    if config.is_dense:
        return 0
    heads = model.num_attention_heads
    index_dtype = index_dtype_for(max_tokens or model.max_position_embeddings)
    index = capacity * jnp.dtype(index_dtype).itemsize
    mass, base = 4, 4 * model.head_dim
    version, held, count = 4, 1, 4
    return slots * (
        version + held + count + model.num_hidden_layers * heads * (index + mass + base)
    )


def create(
    model: OuroConfig, *, slots: int, capacity: int, max_tokens: int | None = None
) -> SparseDecodeReferenceStore:
    """An empty store.

    Args:
      slots: rows at once: outstanding rounds x sequences x rows of a round.
      capacity: kept keys per head; `SparseDecodeConfig.capacity_for` gives the least.
      max_tokens: keys that a row may see, which decides the dtype of positions; None: the
        model's own limit.

    Raises:
      ValueError: a size is not a positive integer.
    """
    max_tokens = model.max_position_embeddings if max_tokens is None else max_tokens
    for name, value in (("slots", slots), ("capacity", capacity), ("max_tokens", max_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    heads, dim = model.num_attention_heads, model.head_dim
    layers = range(model.num_hidden_layers)
    index_dtype = index_dtype_for(max_tokens)
    return SparseDecodeReferenceStore(
        version=jnp.zeros((slots,), jnp.uint32),
        held=jnp.zeros((slots,), bool),
        count=jnp.zeros((slots,), jnp.int32),
        positions=tuple(jnp.zeros((slots, heads, capacity), index_dtype) for _ in layers),
        mass=tuple(jnp.zeros((slots, heads), jnp.float32) for _ in layers),
        base=tuple(jnp.zeros((slots, heads, dim), jnp.float32) for _ in layers),
    )
