"""Rows of an engine's state as the host describes them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.decoding.sampling import request_key
from sparse_loop_jax.decoding.state import RequestParams


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static shapes of an engine's state."""

    rows: int  # requests at once
    num_blocks: int
    page_size: int
    stop_ids: int
    slots: int  # of the reference store; 0 without sparse decode
    width: int  # of the page table: pages per (request, loop)
    capacity: int  # of the reference store, keys per head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowData:
    """What P rows of the state are about, made on the host."""

    row: np.ndarray  # int32 [P]; where it goes, past the end for nowhere
    blocks: np.ndarray  # int32 [P, width]; the number of blocks where there is none
    position: np.ndarray  # int32 [P]
    remaining: np.ndarray  # int32 [P]
    token: np.ndarray  # int32 [P]
    temperature: np.ndarray  # float32 [P]
    top_k: np.ndarray  # int32 [P]
    top_p: np.ndarray  # float32 [P]
    exit_threshold: np.ndarray  # float32 [P]
    min_loops: np.ndarray  # int32 [P]
    max_loops: np.ndarray  # int32 [P]
    stop_ids: np.ndarray  # int32 [P, S]
    seed: np.ndarray  # uint32 [P, 2], low word first


def empty_rows(count: int, sizes: Sizes) -> RowData:
    """`count` rows that go nowhere, to be filled in."""
    zeros = np.zeros(count, np.int32)
    return RowData(
        row=np.full(count, sizes.rows, np.int32),
        blocks=np.full((count, sizes.width), sizes.num_blocks, np.int32),
        position=zeros.copy(),
        remaining=zeros.copy(),
        token=zeros.copy(),
        temperature=np.zeros(count, np.float32),
        top_k=np.ones(count, np.int32),
        top_p=np.ones(count, np.float32),
        exit_threshold=np.ones(count, np.float32),
        min_loops=np.ones(count, np.int32),
        max_loops=np.ones(count, np.int32),
        stop_ids=np.full((count, sizes.stop_ids), -1, np.int32),
        seed=np.zeros((count, 2), np.uint32),
    )


def request_params(rows: RowData) -> RequestParams:
    """What the device keeps of P requests, each with its own key."""
    first = jnp.zeros(rows.seed.shape[:1], jnp.uint32)
    return RequestParams(
        temperature=jnp.asarray(rows.temperature),
        top_k=jnp.asarray(rows.top_k),
        top_p=jnp.asarray(rows.top_p),
        exit_threshold=jnp.asarray(rows.exit_threshold),
        min_loops=jnp.asarray(rows.min_loops),
        max_loops=jnp.asarray(rows.max_loops),
        stop_ids=jnp.asarray(rows.stop_ids),
        key=jax.vmap(request_key)(jnp.asarray(rows.seed), first),
    )
